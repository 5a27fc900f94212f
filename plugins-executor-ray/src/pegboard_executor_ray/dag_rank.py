"""DagRank: a rank whose calls come through a compiled graph, in whose thread the worker lives."""

from __future__ import annotations

import logging
import pickle
import threading
from collections import deque
from typing import Any, Final

from pegboard_executor_mp.messages import Outcome, Reply, Request
from pegboard_executor_ray.rank_actor import RankActor

log = logging.getLogger(__name__)

INLINE, APART, END = b"i", b"a", b"e"
"""First byte of a message or an answer. INLINE: a pickled request or reply follows. APART: a number follows; the content was too
large for the graph, and goes from one process to the other by an ordinary actor call. END: the worker is to shut down."""
_REMEMBERED: Final = 256
NOTHING: Final = b"-"
"""The answer of a rank that was not asked. An empty one would never arrive on another node."""


class CallFailed(Exception):
    """Raised in the graph, so that its reader hears of it without waiting for the other ranks. ``reply``: as a plain tuple."""

    def __init__(self, rank: int, reply: tuple[Any, ...]) -> None:
        super().__init__(rank, reply)
        self.rank, self.reply = rank, reply


class DagRank(RankActor):
    """``pass_on``, ``serve`` and the worker run in the thread of the graph's loop, everything else in the actor's own, which
    therefore answers at any time."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._largest = 0
        self._done: deque[int] = deque(maxlen=_REMEMBERED)
        self._dropping = False
        self._change = threading.Condition()
        self._brought: dict[int, bytes] = {}
        self._served = 0
        self._in_flight = 0
        self._kept: dict[int, tuple[int, bytes]] = {}
        """Call to how many were served before it, and its answer."""

    def prepare_graph(self, buffer_bytes: int, largest: int, in_flight: int) -> None:
        """Before the graph is compiled. ``largest``: bytes of an answer that goes through it, ``in_flight``: calls at a time."""
        from ray.dag import DAGContext
        from ray.experimental.channel.common import ChannelContext

        DAGContext.get_current().buffer_size_bytes = buffer_bytes
        # Nothing but bytes passes. Otherwise Ray would import torch here, to enter its device at every read and write.
        ChannelContext.get_current()._torch_available = False
        self._largest, self._in_flight = largest, in_flight

    # -- in the graph --------------------------------------------------------------------------------------------------

    def pass_on(self, message: bytes) -> bytes:
        """To this rank's place in the next stage, before the message is served here."""
        return message

    def serve(self, message: bytes) -> bytes:
        """One call. Raises ``CallFailed``, and nothing else."""
        kind, data = message[:1], message[1:]
        if kind == END:
            self._end()
            return NOTHING
        if kind == APART:
            data = self._take_brought(int(data))
        if self._dropping:
            return NOTHING
        self._served += 1
        self._forget()
        request = Request(*pickle.loads(data))
        if request.ranks is not None and self.rank not in request.ranks:
            self._done.append(request.call)
            return NOTHING
        reply = Reply(*self.call(tuple(request)))
        self._done.append(request.call)
        if reply.outcome != Outcome.DONE:
            raise CallFailed(self.rank, tuple(reply)) from None
        answer = pickle.dumps(tuple(reply), pickle.HIGHEST_PROTOCOL)
        if len(answer) < self._largest:
            return INLINE + answer
        self._kept[request.call] = (self._served, answer)
        return APART + str(request.call).encode()

    def _forget(self) -> None:
        """Answers that nobody fetches, as another rank failed in the same call, of calls that are in the graph no more."""
        for call, (number, _) in list(self._kept.items()):
            if number <= self._served - self._in_flight:
                self._kept.pop(call, None)

    def _take_brought(self, number: int) -> bytes:
        with self._change:
            self._change.wait_for(lambda: self._dropping or number in self._brought)
            return self._brought.pop(number, b"")

    def _end(self) -> None:
        try:
            self.shutdown()
        except Exception:
            log.exception("shutting down the worker failed")

    # -- beside it -----------------------------------------------------------------------------------------------------

    def bring(self, number: int, message: bytes) -> None:
        """A message that was too large for the graph, through which its number comes."""
        with self._change:
            self._brought[number] = message
            self._change.notify_all()

    def fetch(self, number: int) -> bytes:
        """An answer that was too large for the graph."""
        return self._kept.pop(number)[1]

    def drop_calls(self) -> None:
        """Start no call any more."""
        with self._change:
            self._dropping = True
            self._change.notify_all()

    def has_done(self, call: int) -> bool:
        """Whether it has been carried out here, of the latest calls."""
        return call in self._done
