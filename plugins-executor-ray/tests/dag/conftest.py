"""Executors of the compiled graph whose workers have no model, on two virtual nodes; this process is on the first one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from pegboard.plugins import Composition, WorkerProvider, hookimpl
from pegboard_executor_ray.executor import RayExecutor

MakeExecutor = Callable[..., RayExecutor]
NothingLeft = Callable[[list[int]], None]

SMALL = {"num_cpus": 0.1}
"""Of an executor that finds room on this process's node, whatever else there is."""


@pytest.fixture(autouse=True)
def _cluster(two_nodes: Any) -> None:
    """For every test, so that one cluster does for all of them."""


@pytest.fixture(scope="session")
def open_executor(compose: Callable[..., Composition]) -> MakeExecutor:
    """An executor of ``compose``'s arguments, to be shut down by the caller."""

    def make(*args: Any, options: dict[str, Any] | None = None, **more: Any) -> RayExecutor:
        executor = compose(*args, options={**SMALL, **(options or {})}, **more).create("executor")
        assert isinstance(executor, RayExecutor)
        return executor

    return make


@pytest.fixture
def make_executor(open_executor: MakeExecutor, nothing_left: NothingLeft) -> Iterator[MakeExecutor]:
    """The same, shut down after the test; nothing may be left of it."""
    made: list[RayExecutor] = []
    pids: list[int] = []

    def make(*args: Any, **more: Any) -> RayExecutor:
        executor = open_executor(*args, **more)
        made.append(executor)
        pids.extend(place.pid for place in executor._fleet._crew.places)  # type: ignore[union-attr]
        return executor

    yield make
    for executor in made:
        executor.shutdown()
    if made:
        nothing_left(pids)


@pytest.fixture(scope="module")
def shared(open_executor: MakeExecutor) -> Iterator[MakeExecutor]:
    """``shared(<arguments of open_executor>)``: one executor for all tests of a module that ask for the same, while it works.
    To start one takes seconds."""
    kept: dict[str, RayExecutor] = {}

    def get(*args: Any, **more: Any) -> RayExecutor:
        key = repr((args, more))
        if key not in kept or kept[key]._failure.closed or kept[key]._failure.cause is not None:
            kept[key] = open_executor(*args, **more)
        return kept[key]

    yield get
    for executor in kept.values():
        executor.shutdown()


@pytest.fixture
def nothing_left(wait_until: Callable[..., None], groups: Callable[[], list[str]]) -> NothingLeft:
    """``nothing_left(pids)``: soon there is no process of these any more, nothing of theirs in shared memory, and no actor nor
    placement group but those that there were before the test."""
    before = {*groups(), *alive()}

    def check(pids: list[int]) -> None:
        names = tuple(f"pegboard-mp-{pid}-" for pid in pids)

        def left() -> list[Any]:
            files = [name for name in os.listdir("/dev/shm") if name.startswith(names)]
            new = {*groups(), *alive()} - before
            return [*files, *new, *(pid for pid in pids if psutil.pid_exists(pid))]

        wait_until(lambda: not left(), left)

    return check


def alive() -> list[str]:
    """The actors of the cluster."""
    from ray._private.state import actors

    return [f"{actor['ActorClassName']} {actor['ActorID']}" for actor in actors().values() if actor["State"] != "DEAD"]


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
