"""QueueRank: a rank whose calls come through a message queue, in whose thread the worker lives."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import ray

from pegboard.contracts.transport import Closed, Reader, Writer
from pegboard_executor_mp.messages import Request
from pegboard_executor_mp.queue import Handle, MessageQueue, attach
from pegboard_executor_ray.place import Place
from pegboard_executor_ray.rank_actor import RankActor, Told

log = logging.getLogger(__name__)

SETTINGS: Final = "plugins.executor_ray.chunk_bytes or plugins.executor_ray.num_chunks"
BESIDE: Final = "beside"


class QueueRank(RankActor):
    """``serve`` holds the actor's own thread, in which the worker was made, until the end; ``leave`` and ``where`` have another
    one."""

    groups: ClassVar[Mapping[str, int]] = {BESIDE: 1}

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._requests: Reader | None = None
        self._replies: Writer | None = None
        self._leaving = False
        self._why = ""

    def open_queues(self, requests: Handle, chunk_bytes: int, num_chunks: int) -> Told:
        """Returns the handle of the queue of replies, whose reader is where the writer of ``requests`` is."""

        def work() -> Handle:
            self._requests = attach(requests)
            near = requests.segment is not None
            self._replies = writer = MessageQueue.create(
                int(near),
                remote_readers=int(not near),
                host=Place.here(rank=True).node_ip,
                chunk_bytes=chunk_bytes,
                num_chunks=num_chunks,
                setting=SETTINGS,
            )
            return writer.handle(0)

        return self._telling(work)

    def serve(self) -> None:
        """Carry out one call after the other until ``leave``, or the end of the queue; then leave the queues, which tells the
        engine's process that no reply will come, and shut the worker down: that may hang."""
        assert self._requests is not None
        assert self._replies is not None
        try:
            self._replies.wait_ready()  # a remote queue does nothing unless called: what was put before would stay here
            while not self._leaving:
                self._serve(self._requests.get())
        except Closed as error:
            self._why = "" if self._leaving else f"is cut off from the engine: {error}"
        except Exception as error:
            log.exception("calls can no longer be taken")
            self._why = f"can take no more calls: {type(error).__name__}: {error}"
        finally:
            self._close_queues()
            self.shutdown()

    def _serve(self, message: tuple[Any, ...]) -> None:
        request = Request(*message)
        if request.ranks is None or self.rank in request.ranks:
            assert self._replies is not None
            self._replies.put(self.call(message))

    def _close_queues(self) -> None:
        try:
            if self._requests is not None:
                self._requests.close()
        finally:
            if self._replies is not None:
                self._replies.close()

    def stay(self) -> str:
        return super().stay() or self._why

    # -- beside it -----------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group=BESIDE)
    def leave(self) -> None:
        """End ``serve`` after the call that runs, of which nobody wants to hear."""
        self._leaving = True
        for end in (self._requests, self._replies):
            if end is not None:
                end.cancel()

    @ray.method(concurrency_group=BESIDE)
    def where(self) -> str:  # type: ignore[override]  # what the decorator makes of it is for handles
        return super().where()
