"""Executors of this package whose workers have no model, so that no process needs torch."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from pegboard.config import EngineConfig
from pegboard.plugins import Composition, PluginHost, compose
from pegboard.testing.ranked_model import RankedPlugin
from pegboard_executor_mp.executor import MultiprocExecutor

RPC_WORKER = "pegboard.testing.rpc_worker:RpcWorker"
SOON = 10.0

ComposeMp = Callable[..., Composition]
MakeExecutor = Callable[..., MultiprocExecutor]


@pytest.fixture
def compose_mp() -> ComposeMp:
    """``compose_mp(ranks, options={...}, plugins={name: object}, <fields of ExecutorConfig>)``"""

    def make(
        ranks: int = 2, *, options: dict[str, Any] | None = None, plugins: dict[str, object] | None = None, **executor: Any
    ) -> Composition:
        settings = {"name": "mp", "worker": RPC_WORKER, "tensor_parallel_size": ranks, **executor}
        section = {"preload": [], **(options or {})}
        config = EngineConfig(model="scripted", executor=settings, plugins={"executor_mp": section})  # type: ignore[arg-type]
        return compose(config, PluginHost.load(config.plugins, extra={"ranked": RankedPlugin(), **(plugins or {})}))

    return make


@pytest.fixture
def make_executor(compose_mp: ComposeMp) -> Iterator[MakeExecutor]:
    """An executor of ``compose_mp``'s arguments; shut down after the test, and nothing may be left of it."""
    made: list[MultiprocExecutor] = []
    before = psutil.Process().children(recursive=True)
    pids: list[int] = [os.getpid()]

    def make(*args: Any, **more: Any) -> MultiprocExecutor:
        executor = compose_mp(*args, **more).create("executor")
        assert isinstance(executor, MultiprocExecutor)
        made.append(executor)
        pids.extend(executor._fleet._pids.values())
        return executor

    yield make
    for executor in made:
        executor.shutdown()
    made.clear()
    nothing_left(pids, before)


@pytest.fixture
def run_with_shm() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run_with_shm(mebibytes, command)``: in a mount namespace whose ``/dev/shm`` has so much room."""

    def run(mebibytes: int, command: list[str]) -> subprocess.CompletedProcess[str]:
        mount = f'mount -t tmpfs -o size={mebibytes}m tmpfs /dev/shm && exec "$@"'
        inside = ["unshare", "-rm", "sh", "-c", mount, "sh"]
        if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
            pytest.skip("no mount namespaces here")
        return subprocess.run([*inside, *command], capture_output=True, text=True, timeout=60, check=False)

    return run


def nothing_left(pids: list[int], before: list[psutil.Process]) -> None:
    def left() -> list[Any]:
        names = tuple(f"pegboard-{kind}-{pid}-" for kind in ("mq", "mp") for pid in pids)
        files = [name for name in os.listdir("/dev/shm") if name.startswith(names)]
        return [*files, *(child for child in psutil.Process().children(recursive=True) if child not in before)]

    end = time.monotonic() + SOON
    while remains := left():
        assert time.monotonic() < end, f"left over: {remains}"
        time.sleep(0.01)
