"""ThreadExecutor: every rank's worker on a thread of this process, for tests of what several ranks compute together.

Give ``ThreadRanks()`` as a plugin, and name its parts::

    LLM(folder, plugins={"threads": ThreadRanks()}, executor={**THREADS, "tensor_parallel_size": 2})
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, ClassVar, Final

import msgspec

from pegboard.contracts.executor import ALL, Executor, ExecutorFailed, Ranks, WorkerError
from pegboard.contracts.worker import Worker, check_method, resolve_method
from pegboard.plugins import CommunicatorProvider, ExecutorProvider, hookimpl

THREADS: Final[dict[str, Any]] = {"name": "threads", "communicator": "threads", "num_threads": 1}
"""The section ``executor`` of a configuration, without the numbers of ranks."""
_PATIENCE = 60.0


class ThreadExecutor(Executor):
    """``workers``: of all ranks, for looking."""

    supports_pp: ClassVar[bool] = True
    supports_async_scheduling: ClassVar[bool] = True

    def _init_executor(self) -> None:
        self._closed = False
        self.workers: list[Worker] = []
        self._callbacks: list[Callable[[BaseException], None]] = []
        self._queues: list[SimpleQueue[Callable[[], None] | None]] = [SimpleQueue() for _ in range(self.world.size)]
        self._threads = [threading.Thread(target=_serve, args=(queue,), daemon=True) for queue in self._queues]
        for thread in self._threads:
            thread.start()
        places = [
            msgspec.structs.replace(self.world, rank=rank, local_rank=rank, rendezvous=f"threads-{id(self):x}")
            for rank in range(self.world.size)
        ]
        try:
            self.workers += [self.composition.create("worker", world=place) for place in places]
            self.collective_rpc("init_device")
            self.collective_rpc("load_model")
        except BaseException:
            self.shutdown()
            raise

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        non_block: bool = False,
        ranks: Ranks = ALL,
    ) -> Any:
        if self._closed:
            raise ExecutorFailed("the executor was shut down")
        if isinstance(method, str):
            check_method(type(self.workers[0]), method, self.workers[0].extensions)
        asked = range(self.world.size) if ranks == ALL else ranks
        answer = _Answer([int(rank) for rank in asked])
        for rank in answer.ranks:
            self._queues[rank].put(self._call(rank, method, args, kwargs or {}, answer))
        return answer.future if non_block else answer.future.result(timeout or _PATIENCE)

    def _call(
        self, rank: int, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], answer: _Answer
    ) -> Callable[[], None]:
        def call() -> None:
            worker = self.workers[rank]
            try:
                result = (
                    resolve_method(worker, method)(*args, **kwargs)
                    if isinstance(method, str)
                    else method(worker, *args, **kwargs)
                )
            except BaseException as error:
                answer.fail(rank, error)
            else:
                answer.put(rank, result)

        return call

    def check_health(self) -> None:
        self.collective_rpc("check_health")

    def register_failure_callback(self, callback: Callable[[BaseException], None]) -> None:
        self._callbacks.append(callback)

    def _shutdown(self) -> None:
        self._closed = True
        for worker, queue in zip(self.workers, self._queues, strict=False):
            queue.put(worker.shutdown)
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join(_PATIENCE)


class _Answer:
    """The replies to one call, in the order of ``ranks``."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks
        self.future: Future[list[Any]] = Future()
        self._lock = threading.Lock()
        self._replies: dict[int, Any] = {}

    def put(self, rank: int, result: Any) -> None:
        with self._lock:
            self._replies[rank] = result
            if len(self._replies) == len(set(self.ranks)) and not self.future.done():
                self.future.set_result([self._replies[r] for r in self.ranks])

    def fail(self, rank: int, error: BaseException) -> None:
        failure = WorkerError.of(rank, error)
        failure.__cause__ = error
        with self._lock:
            if not self.future.done():
                self.future.set_exception(failure)


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := queue.get()) is not None:
        call()


class ThreadRanks:
    """Offers the executor and the communicator ``threads``."""

    @hookimpl
    def executors(self) -> Iterable[ExecutorProvider]:
        yield ExecutorProvider(name="threads", target=ThreadExecutor, capabilities=frozenset({"tp", "pp", "async_steps"}))

    @hookimpl
    def communicators(self) -> Iterable[CommunicatorProvider]:
        yield CommunicatorProvider(
            name="threads", target="pegboard.testing.thread_communicator:ThreadCommunicator", one_host=True, priority=-1
        )
