"""The contract of executors, kept by one whose calls all ranks make: other processes make those of the test after it."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import pytest

from pegboard.config import EngineConfig
from pegboard.contracts.executor import ALL, Executor, ExecutorFailed, Ranks, WorkerError
from pegboard.plugins import PluginHost, compose
from pegboard.testing.conformance.executor import PATIENCE, ExecutorConformance, plan
from pegboard.testing.processes import Child
from pegboard.testing.ranked_model import RankedPlugin

from .conftest import MEETING, free_port


def start(env: dict[str, str], ranks: int, step_timeout: float | None) -> Executor:
    os.environ.update(env)
    settings = {"name": "external_launcher", "worker": "pegboard.testing.rpc_worker:RpcWorker", "tensor_parallel_size": ranks}
    options = {"standard": {"launch_timeout": MEETING}}
    config = EngineConfig(model="scripted", executor={**settings, "step_timeout": step_timeout}, plugins=options)  # type: ignore[arg-type]
    executor: Executor = compose(config, PluginHost.load(extra={"ranked": RankedPlugin()})).create("executor")
    return executor


def follow(pipe: Any) -> None:
    """A rank that makes the calls that it is told of, and waits for none of them."""
    executor: Any = None
    while True:
        what, *rest = pickle.loads(pipe.recv_bytes())
        if what == "start":
            try:
                executor = start(*rest)
            except Exception:
                traceback.print_exc()
            continue
        with contextlib.suppress(Exception):  # the test sees it on its own rank
            if what == "shutdown":
                executor.shutdown()
            else:
                getattr(executor, what)(*rest[0], **rest[1], non_block=True)


class Led(Executor):
    """``own``, the executor of one rank, and ``others``, which follow in what it is told to do."""

    def __init__(self, own: Executor, others: Sequence[Child]) -> None:
        self.own, self.others, self.world = own, others, own.world
        self._order = threading.Lock()

    def _init_executor(self) -> None: ...

    def _tell(self, *what: Any) -> None:
        for child in self.others:
            with contextlib.suppress(OSError):  # it was killed
                child.connection.send_bytes(cloudpickle.dumps(what))

    def _all(self, method: str, args: tuple[Any, ...], named: dict[str, Any], non_block: bool) -> Any:
        with self._order:
            self._tell(method, args, named)
            future = getattr(self.own, method)(*args, **named, non_block=True)
        return future if non_block else future.result()

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
        return self._all("collective_rpc", (method, args, kwargs), {"timeout": timeout, "ranks": ranks}, non_block)

    def _step(self, method: str, argument: Any, non_block: bool) -> Any:
        return self._all("_step", (method, argument), {}, non_block)

    def check_health(self) -> None:
        self.own.check_health()

    def register_failure_callback(self, callback: Callable[[BaseException], None]) -> None:
        self.own.register_failure_callback(callback)

    def _shutdown(self) -> None:
        self.own.shutdown()
        self._tell("shutdown")


@pytest.fixture(scope="module")
def followers() -> Iterator[list[Child]]:
    """Processes that stay; who was killed is replaced."""
    found: list[Child] = []
    cloudpickle.register_pickle_by_value(__import__("sys").modules[__name__])
    yield found
    for child in found:
        child.kill()


class External(ExecutorConformance):
    ranks = 2
    led = 0
    """The rank of the test's own process."""

    @pytest.fixture(autouse=True)
    def _make(self, followers: list[Child], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        self._followers, self._made = followers, []
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.setenv(name, "0")  # put back as it was, whatever is set later
        monkeypatch.delenv("LOCAL_RANK")
        yield
        for executor in self._made:
            executor.shutdown()

    def make(self, *, step_timeout: float | None = None) -> Executor:
        others = self._others()
        shared = {"WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared["TORCHELASTIC_RUN_ID"] = shared["MASTER_PORT"]
        ranks = [rank for rank in range(self.ranks) if rank != self.led]
        for rank, child in zip(ranks, others, strict=True):
            told = ("start", {**shared, "RANK": str(rank)}, self.ranks, step_timeout)
            child.connection.send_bytes(cloudpickle.dumps(told))
        self._made.append(Led(start({**shared, "RANK": str(self.led)}, self.ranks, step_timeout), others))
        return self._made[-1]

    def _others(self) -> list[Child]:
        alive = [child for child in self._followers if child.process.is_alive()]
        alive += [Child(follow, "spawn") for _ in range(self.ranks - 1 - len(alive))]
        self._followers[:] = alive
        return alive[: self.ranks - 1]

    def break_for_good(self, executor: Executor) -> None:
        """The end of another rank's process. A rank that is alone can only hang."""
        if self.ranks == 1:
            with pytest.raises(ExecutorFailed, match=r"step 1 .* no answer from rank 0 within 0.2 s"):
                executor.execute_model(plan(1, sleep=1.0))
            return
        other = self.ranks - 1 - self.led
        with pytest.raises((WorkerError, ExecutorFailed), match=rf"rank {other} \(process \d+ on .*\) has ended"):
            executor.collective_rpc(lambda worker: os._exit(3), timeout=PATIENCE, ranks=[other])


class TestAlone(External):
    ranks = 1


@pytest.mark.slow
class TestFirstOfTwo(External):
    pass


@pytest.mark.slow
class TestLastOfThree(External):
    ranks = 3
    led = 2
