"""One cluster of two virtual nodes on this machine for all tests that ask for it, and crews of ranks on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import cloudpickle
import psutil
import pytest

from pegboard.config import EngineConfig
from pegboard.contracts.executor import ExecutorFailed, WorkerError
from pegboard.plugins import Composition, PluginHost, compose
from pegboard.testing.ranked_model import RankedPlugin
from pegboard.wire import World
from pegboard_executor_mp.messages import Outcome, Reply, Request
from pegboard_executor_mp.packing import pack, unpack

RPC_WORKER = "pegboard.testing.rpc_worker:RpcWorker"
SOON = 60.0
STORE = 100 << 20


class TwoNodes:
    """The driver's node has four CPUs, two GPUs (by name only) and the resource "near", the other one two CPUs and "far". Started
    when first asked for, and connected to again after a test that failed in between."""

    def __init__(self) -> None:
        self._cluster: Any = None

    def start(self) -> None:
        if self._cluster is None:
            from ray.cluster_utils import Cluster

            common = {"object_store_memory": STORE, "include_dashboard": False}
            self._cluster = Cluster(
                initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 2, "resources": {"near": 4}, **common}
            )
            self._cluster.add_node(num_cpus=2, resources={"far": 2}, **common)
        self.connect()

    def connect(self) -> None:
        import ray

        if ray.is_initialized() and ray.get_runtime_context().gcs_address == self.address:
            return
        ray.shutdown()
        ray.init(address=self.address, logging_level="warning")

    def disconnect(self) -> None:
        import ray

        ray.shutdown()

    def stop(self) -> None:
        if self._cluster is not None:
            self.disconnect()
            nodes = self._cluster.list_all_nodes()
            raylets = [process.process.pid for node in nodes for process in node.all_processes.get("raylet", ())]
            self._cluster.shutdown()
            self._cluster = None
            _remove_semaphores(raylets)

    @property
    def address(self) -> str:
        return str(self._cluster.address)


def _remove_semaphores(raylets: list[int]) -> None:
    """Of channels of compiled graphs, which a raylet removes when it ends in peace: the cluster kills it."""
    names = tuple(f"sem.{kind}{pid}-" for kind in ("hdr", "obj") for pid in raylets)
    for name in os.listdir("/dev/shm"):
        if name.startswith(names):
            os.unlink(f"/dev/shm/{name}")


_two_nodes = TwoNodes()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The cluster goes before tests that have another one, or none, and after what fixtures of this one still have on it."""
    if nextitem is None or "two_nodes" not in getattr(nextitem, "fixturenames", ()):
        _two_nodes.stop()


@pytest.fixture
def two_nodes() -> TwoNodes:
    _two_nodes.start()
    return _two_nodes


@pytest.fixture(scope="session")
def nodes() -> TwoNodes:
    """The same, not started, for fixtures of tests that all ask for ``two_nodes``."""
    return _two_nodes


def compose_ray(
    ranks: int = 2, *, options: dict[str, Any] | None = None, plugins: dict[str, object] | None = None, **executor: Any
) -> Composition:
    """Of workers without a model; ``executor``: fields of ``ExecutorConfig``."""
    settings = {"name": "ray", "worker": RPC_WORKER, "tensor_parallel_size": ranks, **executor}
    config = EngineConfig(model="scripted", executor=settings, plugins={"executor_ray": options or {}})  # type: ignore[arg-type]
    return compose(config, PluginHost.load(config.plugins, extra={"ranked": RankedPlugin(), **(plugins or {})}))


@pytest.fixture(name="compose", scope="session")
def _compose() -> Callable[..., Composition]:
    return compose_ray


@pytest.fixture(name="wait_until", scope="session")
def _wait_until() -> Callable[..., None]:
    return wait_until


@pytest.fixture(name="groups", scope="session")
def _groups() -> Callable[[], list[str]]:
    return placement_groups


class MakeCrew(Protocol):
    """``make_crew(ranks, options={...}, plugins={name: object}, composition=None, <fields of ExecutorConfig>)``"""

    def __call__(self, ranks: int = ..., **more: Any) -> Any: ...


@pytest.fixture
def make_crew() -> Iterator[MakeCrew]:
    """Crews, stopped after the test; nothing may be left of them. Each has ``losses``, what it was told of."""
    from pegboard_executor_ray.crew import Crew
    from pegboard_executor_ray.options import Options

    made: list[Crew] = []
    pids: list[int] = []

    def make(ranks: int = 2, *, composition: Composition | None = None, **more: Any) -> Crew:
        losses: list[ExecutorFailed] = []
        composition = composition or compose_ray(ranks, **more)
        crew = Crew(composition, composition.options("executor_ray") or Options(), World(tp_size=ranks), losses.append)
        crew.losses = losses  # type: ignore[attr-defined]
        made.append(crew)
        pids.extend(place.pid for place in crew.places)
        return crew

    yield make
    for crew in made:
        crew.stop(hurry=True)
    nothing_left(pids)


def nothing_left(pids: list[int]) -> None:
    """Soon no process of these is there any more, nor a placement group, nor what they put into shared memory."""
    import ray

    def left() -> list[Any]:
        names = tuple(f"pegboard-mp-{pid}-" for pid in pids)
        files = [name for name in os.listdir("/dev/shm") if name.startswith(names)]
        groups = placement_groups() if ray.is_initialized() else []
        return [*files, *groups, *(pid for pid in pids if psutil.pid_exists(pid))]

    wait_until(lambda: not left(), left)


def placement_groups() -> list[str]:
    """Those of the connected cluster that nobody has removed."""
    from ray.util.placement_group import placement_group_table

    return [f"{group['name']} {group['state']}" for group in placement_group_table().values() if group["state"] != "REMOVED"]


def wait_until(condition: Callable[[], bool], found: Callable[[], object] = lambda: "it did not happen") -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end, found()
        time.sleep(0.02)


@pytest.fixture
def on_all() -> Callable[..., list[Any]]:
    """``on_all(crew, method, *arguments)``: what a worker's method, or a function of the worker, returns on each rank."""
    import ray

    def ask(crew: Any, method: Any, *arguments: Any) -> list[Any]:
        packed = method if isinstance(method, str) else pack(method)
        request = tuple(Request(0, packed, pack((arguments, {})), None, None))
        replies = [Reply(*reply) for reply in ray.get([actor.call.remote(request) for actor in crew.actors], timeout=SOON)]
        for reply in replies:
            if reply.outcome == Outcome.FAILED:
                raise WorkerError(*reply.content)
        return [unpack(reply.content) for reply in replies]

    return ask


@pytest.fixture(autouse=True)
def _by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Functions of the test's module go to other processes by value, as those of a script would."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)
