"""The replies of one rank, taken by a thread and given to the calls that wait for them."""

from __future__ import annotations

from collections.abc import Callable

from pegboard.contracts.executor import WorkerError
from pegboard.contracts.transport import Closed, Reader
from pegboard_executor_mp.calls import Calls
from pegboard_executor_mp.messages import Outcome, Reply
from pegboard_executor_mp.packing import unpack

BeforeError = Callable[[WorkerError], None]
"""Called before a call fails, and may find that the error is only the symptom of something else."""


def take_replies(rank: int, reader: Reader, calls: Calls, before_error: BeforeError) -> str:
    """For a thread of its own: returns, and says why, when the rank has closed its end of the queue or ended, or this end is."""
    while True:
        try:
            reply = Reply(*reader.get())
        except Closed as error:
            return str(error)
        take_reply(rank, reply, calls, before_error)
        del reply  # hold nothing while idle


def take_reply(rank: int, reply: Reply, calls: Calls, before_error: BeforeError) -> None:
    if not calls.is_open(reply.call):
        return
    if reply.outcome == Outcome.DONE:
        try:
            calls.reply(reply.call, rank, None if reply.content is None else unpack(reply.content))
        except BaseException as error:  # unpickling runs code, which may raise SystemExit, and then nobody would take replies
            failure = WorkerError.of(rank, error)
            failure.add_note("The reply came, but cannot be loaded in this process.")
            calls.fail(reply.call, failure)
    elif reply.outcome == Outcome.REFUSED:
        calls.fail(reply.call, AttributeError(reply.content))
    else:
        told = WorkerError(*reply.content)
        before_error(told)
        calls.fail(reply.call, told)
