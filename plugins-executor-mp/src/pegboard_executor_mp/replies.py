"""The replies of one rank, taken by a thread and given to the calls that wait for them."""

from __future__ import annotations

from collections.abc import Callable

from pegboard.contracts.executor import WorkerError
from pegboard.contracts.transport import Closed, Reader
from pegboard_executor_mp.calls import Calls
from pegboard_executor_mp.messages import Outcome, Reply
from pegboard_executor_mp.packing import unpack


def take_replies(rank: int, reader: Reader, calls: Calls, before_error: Callable[[int], None]) -> None:
    """The target of a thread: returns when the rank has closed its end of the queue or ended, or this end is closed.

    ``before_error(rank)`` is called before a call fails, and may find that the error is only the symptom of something else.
    """
    while True:
        try:
            reply = Reply(*reader.get())
        except Closed:
            return
        if not calls.is_open(reply.call):
            continue
        if reply.outcome == Outcome.DONE:
            try:
                calls.reply(reply.call, rank, None if reply.content is None else unpack(reply.content))
            except Exception as error:
                failure = WorkerError.of(rank, error)
                failure.add_note("The reply came, but cannot be loaded in this process.")
                calls.fail(reply.call, failure)
        elif reply.outcome == Outcome.REFUSED:
            calls.fail(reply.call, AttributeError(reply.content))
        else:
            before_error(rank)
            calls.fail(reply.call, WorkerError(*reply.content))
        del reply  # hold nothing while idle
