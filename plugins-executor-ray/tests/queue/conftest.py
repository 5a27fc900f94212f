"""Executors of the message queue whose workers have no model, on two virtual nodes; this process is on the first one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from pegboard.plugins import Composition, WorkerProvider, hookimpl
from pegboard_executor_ray.queue_executor import RayQueueExecutor

MakeExecutor = Callable[..., RayQueueExecutor]
NothingLeft = Callable[[RayQueueExecutor], None]


@pytest.fixture(autouse=True)
def _cluster(two_nodes: Any) -> None:
    """For every test, so that one cluster does for all of them."""


@pytest.fixture(scope="session")
def open_executor(compose: Callable[..., Composition]) -> MakeExecutor:
    """An executor of ``compose``'s arguments, to be shut down by the caller."""

    def make(*args: Any, **more: Any) -> RayQueueExecutor:
        executor = compose(*args, name="ray-mq", **more).create("executor")
        assert isinstance(executor, RayQueueExecutor)
        return executor

    return make


@pytest.fixture
def make_executor(open_executor: MakeExecutor, nothing_left: NothingLeft) -> Iterator[MakeExecutor]:
    """The same, shut down after the test; nothing may be left of it."""
    made: list[RayQueueExecutor] = []

    def make(*args: Any, **more: Any) -> RayQueueExecutor:
        made.append(open_executor(*args, **more))
        return made[-1]

    yield make
    for executor in made:
        executor.shutdown()
        nothing_left(executor)


@pytest.fixture(scope="session")
def nothing_left(wait_until: Callable[..., None], groups: Callable[[], list[str]]) -> NothingLeft:
    """``nothing_left(executor)``: soon its ranks have no process any more, no placement, nothing in shared memory."""

    def check(executor: RayQueueExecutor) -> None:
        crew = executor._fleet._crew
        assert crew is not None
        pids = [place.pid for place in crew.places]
        names = tuple(f"pegboard-{kind}-{pid}-" for kind in ("mq", "mp") for pid in (*pids, os.getpid()))

        def left() -> list[Any]:
            files = [name for name in os.listdir("/dev/shm") if name.startswith(names)]
            placed = [group for group in groups() if group.startswith(crew._name)]
            return [*files, *placed, *(pid for pid in pids if psutil.pid_exists(pid))]

        wait_until(lambda: not left(), left)

    return check


@pytest.fixture
def plugin_with() -> Callable[[type], dict[str, object]]:
    """A plugin given directly that offers a worker, "own", which goes to the ranks by value."""

    def make(worker: type) -> dict[str, object]:
        class Plugin:
            @hookimpl
            def workers(self) -> list[WorkerProvider]:
                return [WorkerProvider(name="own", target=worker)]

        return {"own": Plugin()}

    return make
