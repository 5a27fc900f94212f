"""The ranks of one engine, and the message queues to and from them."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, ClassVar, Final

from pegboard.contracts.executor import ExecutorFailed
from pegboard.contracts.transport import Closed, Reader, Writer
from pegboard.wire import World
from pegboard_executor_mp import launch, traces
from pegboard_executor_mp.calls import Calls, Deadline
from pegboard_executor_mp.failure import Failure
from pegboard_executor_mp.queue import Handle, MessageQueue, attach
from pegboard_executor_mp.replies import take_replies
from pegboard_executor_ray import autostart
from pegboard_executor_ray.crew import Crew
from pegboard_executor_ray.options import Options
from pegboard_executor_ray.queue_rank import SETTINGS, QueueRank
from pegboard_executor_ray.ray_fleet import NODE_VERDICT_SECONDS, RayFleet
from pegboard_executor_ray.waiting import wait

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.1
"""Between looks whether somebody has lost patience with ranks that are to end."""
_JOIN_SECONDS: Final = 5.0


class QueueFleet(RayFleet):
    """One queue carries calls to all ranks: over shared memory on this process's node, over TCP to the others. Each rank has one
    for its replies, of the same kind, and this process a thread that takes them."""

    actor_class: ClassVar[type[QueueRank]] = QueueRank

    def __init__(self, options: Options, world: World, step_timeout: float | None, calls: Calls, failure: Failure) -> None:
        super().__init__(options, world, step_timeout, calls, failure)
        self._requests: Writer | None = None
        self._segment: str | None = None
        self._serving: list[Any] = []
        self._readers: list[Reader] = []
        self._threads: list[threading.Thread] = []
        self._impatient = threading.Event()

    @property
    def requests(self) -> Writer:
        assert self._requests is not None
        return self._requests

    def _connect(self, crew: Crew, deadline: Deadline) -> None:
        options, actors = self._options, crew.actors
        handles = self._open_requests(crew)
        opening = {
            rank: actors[rank].open_queues.remote(handle, options.chunk_bytes, options.num_chunks)
            for rank, handle in handles.items()
        }
        try:
            replies = crew.results(opening, deadline, "no queues")
            self._serving = [actor.serve.remote() for actor in actors]
            for rank, handle in zip(opening, replies, strict=True):
                self._readers.append(attach(handle))
                self._listen(rank, self._readers[-1], crew)
            self.requests.wait_ready(deadline.left())
        except (Closed, ExecutorFailed) as error:
            self.raise_verdict(f"a rank was lost before it took calls: {error}")

    def _open_requests(self, crew: Crew) -> dict[int, Handle]:
        """Rank to its end of the queue."""
        near = [rank for rank, place in enumerate(crew.places) if place.node_id == crew.driver.node_id]
        far = [rank for rank in range(self._world.size) if rank not in near]
        chunk_bytes, num_chunks = self._options.chunk_bytes, self._options.num_chunks
        if near:
            launch.check_shared_memory(chunk_bytes, num_chunks, len(near), SETTINGS)
        self._requests = writer = MessageQueue.create(
            len(near),
            remote_readers=len(far),
            host=crew.driver.node_ip,
            chunk_bytes=chunk_bytes,
            num_chunks=num_chunks,
            setting=SETTINGS,
        )
        self._segment = writer.handle(0).segment
        return {rank: writer.handle(reader) for reader, rank in enumerate([*near, *far])}

    def _listen(self, rank: int, reader: Reader, crew: Crew) -> None:
        who = f"worker rank {rank} (process {crew.places[rank].pid} on {crew.places[rank].node})"
        name = f"pegboard-ray-replies-{rank}"
        thread = autostart.never_from(
            threading.Thread(target=self._take_replies, args=(rank, who, reader), name=name, daemon=True)
        )
        self._threads.append(thread)
        thread.start()

    def _take_replies(self, rank: int, who: str, reader: Reader) -> None:
        """When it returns nobody takes replies of ``rank`` any more, so then the executor has ended."""
        try:
            how = take_replies(rank, reader, self._calls, self._before_error)
        except BaseException as error:  # out of memory, for one
            log.exception("replies of rank %d cannot be taken", rank)
            self._fail_apart(ExecutorFailed(f"replies of {who} cannot be taken: {type(error).__name__}: {error}"))
        else:
            if not self._failure.wait(NODE_VERDICT_SECONDS):  # its end would have been told by now
                self._fail_apart(ExecutorFailed(f"{who} answers no more, though Ray knows nothing of its end: {how}"))

    # -- the end -------------------------------------------------------------------------------------------------------

    def _wait_no_longer(self) -> None:
        self._impatient.set()
        if self._requests is not None:
            self._requests.cancel()

    def _dismiss(self, crew: Crew) -> None:
        try:
            if self._requests is not None:
                self._requests.cancel()
            if crew.connected and (self.hurry or not self._have_left(crew)):
                self._kill(crew)
        except Exception:
            log.log(logging.WARNING if crew.connected else logging.DEBUG, "the ranks cannot be told to end", exc_info=True)
        finally:
            crew.stop(self.hurry)
            self._close_queues(crew)

    def _have_left(self, crew: Crew) -> bool:
        """Whether all ranks have shut their workers down, after the calls that they carry out, while they are given time."""
        for actor in crew.actors:
            actor.leave.remote()
        deadline = Deadline(self._options.shutdown_timeout)
        waiting = list(self._serving)
        while waiting and not self._impatient.is_set() and (left := deadline.left()):
            waiting = wait(waiting, min(left, _LOOK_SECONDS))[1]
        return not waiting

    def _close_queues(self, crew: Crew) -> None:
        for end in (self._requests, *self._readers):
            if end is not None:
                end.close()
        end_of_wait = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, end_of_wait - time.monotonic()))
        here = [place.pid for place in crew.places if place.node_id == crew.driver.node_id]
        traces.remove_queues(self._segment, here)
