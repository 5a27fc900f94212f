"""Crews of ranks on two virtual nodes: where they are, what they are given, how they end."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from pegboard.contracts.executor import ExecutorFailed, WorkerError
from pegboard.engine.errors import EngineStartError
from pegboard.plugins import PluginError, WorkerProvider, hookimpl
from pegboard.testing.rpc_worker import RpcWorker
from pegboard_executor_ray import crew as crew_module
from pegboard_executor_ray.loss import raised_by_ray
from pegboard_executor_ray.waiting import wait

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_nodes")]
FAR = {"num_cpus": 0, "resources": {"far": 1}}
"""Options that put ranks on the other node than the driver's."""
SPREAD = {"strategy": "STRICT_SPREAD"}

OnAll = Callable[..., list[Any]]


# -- places ------------------------------------------------------------------------------------------------------------


def test_ranks_on_the_driver_s_node(make_crew: Any, on_all: OnAll) -> None:
    crew = make_crew(2)
    assert {place.node_id for place in crew.places} == {crew.driver.node_id}
    assert crew.one_node
    assert [(w.rank, w.local_rank, w.local_size, w.tp_size) for w in crew.worlds] == [(0, 0, 2, 2), (1, 1, 2, 2)]
    assert on_all(crew, lambda worker: worker.world) == list(crew.worlds)
    folder = crew.worlds[0].rendezvous
    assert folder.startswith("/dev/shm/")
    assert [psutil.Process(place.pid).name() for place in crew.places] == ["pegboard-rank0", "pegboard-rank1"]
    assert [place.devices for place in crew.places] == [(), ()]
    names = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    assert {f"{crew._name}-rank0", f"{crew._name}-rank1"} <= names
    assert len(set(on_all(crew, lambda worker: os.getpid()))) == 2
    crew.stop()
    crew.stop()
    assert not os.path.exists(folder)
    assert not crew.losses


def test_ranks_see_the_devices_of_their_node_and_have_one_each(
    make_crew: Any, on_all: OnAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's own is at its local rank, whatever this process sees."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    crew = make_crew(2, options={"num_gpus": 1, "num_cpus": 0})
    own = [place.devices for place in crew.places]
    assert sorted(own) == [("0",), ("1",)]
    (visible,) = set(on_all(crew, lambda worker: os.environ["CUDA_VISIBLE_DEVICES"]))
    assert [(device,) for device in visible.split(",")] == own


def test_ranks_of_a_node_are_neighbours_and_meet_at_a_store(make_crew: Any, on_all: OnAll) -> None:
    """Three ranks, two nodes: the driver's first. Placed one by one, Ray would mix them."""
    crew = make_crew(3, options={"strategy": "SPREAD"})
    nodes = [place.node_id for place in crew.places]
    assert nodes == sorted(nodes, key=lambda node: node != crew.driver.node_id)
    assert nodes[0] == crew.driver.node_id != nodes[-1]
    assert [w.local_rank for w in crew.worlds] == [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    assert [w.local_size for w in crew.worlds] == [nodes.count(node) for node in nodes]
    assert not crew.one_node
    (rendezvous,) = {world.rendezvous for world in crew.worlds}
    assert rendezvous.startswith("tcp://")
    assert on_all(crew, lambda worker: worker.composition.parts["communicator"].name) == ["torch_distributed"] * 3

    def meet(worker: Any) -> float:
        import torch

        world = worker.world
        made = worker.composition.create(
            "communicator",
            rank=world.rank,
            world_size=world.size,
            group="test",
            rendezvous=world.rendezvous,
            device=torch.device("cpu"),
            timeout=60.0,
        )
        total: float = made.all_reduce(torch.tensor([10.0**world.rank])).item()
        made.close()
        return total

    assert on_all(crew, meet) == [111.0] * 3


def test_a_communicator_for_one_host_is_refused_across_nodes(make_crew: Any) -> None:
    with pytest.raises(PluginError, match=r"'shared_memory' is for ranks on one host.*'torch_distributed'"):
        make_crew(2, options=SPREAD, communicator="shared_memory")


# -- plugins -----------------------------------------------------------------------------------------------------------

NOTES = """
    import os
    from pegboard.plugins import hookimpl, WorkerProvider

    with open({path!r}, "a") as file:
        kind = open("/proc/self/comm").read().strip()
        file.write(f"{{os.getpid()}} {{kind}}\\n")

    @hookimpl
    def workers():
        return [WorkerProvider(name="acme", target="pegboard.testing.rpc_worker:RpcWorker")]
"""


def test_ranks_load_the_plugins_of_the_engine_s_process_once(
    make_crew: Any, on_all: OnAll, plugin_factory: Any, tmp_path: Path
) -> None:
    """Also where only this process's import path leads to them."""
    notes = tmp_path / "notes"
    plugin_factory(NOTES.format(path=str(notes)), name="acme")
    crew = make_crew(2, options=SPREAD, worker="acme")
    on_all(crew, "echo", 1)
    lines = [line.split(" ", 1) for line in notes.read_text().splitlines()]
    here = (str(os.getpid()), psutil.Process().name())
    ranks = [(str(place.pid), f"pegboard-rank{rank}") for rank, place in enumerate(crew.places)]
    assert sorted(map(tuple, lines)) == sorted([here, *ranks])


def test_another_version_of_a_plugin_is_refused_with_its_node(make_crew: Any, compose: Any, plugin_factory: Any) -> None:
    written = plugin_factory(NOTES.format(path=os.devnull), name="acme")
    composition = compose(1, worker="acme", options=FAR)
    metadata = next(written.metadata.glob("METADATA"))
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 2.0"))
    with pytest.raises(WorkerError) as caught:
        make_crew(1, composition=composition)
    text = str(caught.value)
    assert "PluginError: this process would not load the plugins of the process that started it" in text
    assert "acme" in text
    assert "version 2.0" in text
    assert "(on node " in text


def test_plugins_that_cannot_be_sent_are_refused_before_anything_is_placed(make_crew: Any) -> None:
    class HoldsALock:
        lock = threading.Lock()

    with pytest.raises(PluginError, match=r"plugin 'locked' \(given directly\) cannot be sent.*entry point"):
        make_crew(1, plugins={"locked": HoldsALock()})


def test_a_node_without_the_package_says_so(make_crew: Any, tmp_path: Path) -> None:
    (tmp_path / "pegboard_executor_ray.py").write_text("raise ModuleNotFoundError('No module named pegboard_executor_ray')")
    told = r"rank 0 on node .* starting, cannot import .*: ModuleNotFoundError: .*; every node needs the packages"
    with pytest.raises(ExecutorFailed, match=told):
        make_crew(1, options={"runtime_env": {"env_vars": {"PYTHONPATH": str(tmp_path)}}})


# -- environment -------------------------------------------------------------------------------------------------------


def test_what_is_set_here_arrives_in_every_rank(
    make_crew: Any, on_all: OnAll, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Variables set after Ray was started, plugin sections, import path, working folder; not what is a node's own."""
    monkeypatch.setenv("ACME_SETTING", "17")
    monkeypatch.setenv("ACME_SECRET", "18")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setenv("LOCAL_RANK", "9")
    monkeypatch.setenv("RAY_JOB_ID", "of this process")
    monkeypatch.setenv("XDG_ACME", "wanted")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme_helper.py").write_text("value = 5")
    options = {
        **SPREAD,
        "environment_block": ["*_SECRET"],
        "environment_carry": ["XDG_*"],
        "runtime_env": {"env_vars": {"ACME_OTHER": "19", "LOCAL_RANK": "given"}},
    }
    names = ("ACME_SETTING", "ACME_SECRET", "ACME_OTHER", "XDG_ACME", "LOCAL_RANK")

    def look(worker: Any) -> Any:
        import acme_helper  # type: ignore[import-not-found]

        return [os.environ.get(name) for name in names], acme_helper.value, os.getcwd()

    crew = make_crew(2, options=options)
    assert on_all(crew, look) == [(["17", None, "19", "wanted", "given"], 5, str(tmp_path))] * 2
    assert on_all(crew, lambda worker: os.environ.get("CUDA_VISIBLE_DEVICES")) != ["5", "5"]
    assert "of this process" not in on_all(crew, lambda worker: os.environ["RAY_JOB_ID"])
    section = crew.options.model_dump()
    assert on_all(crew, lambda worker: worker.composition.options("executor_ray").model_dump()) == [section] * 2


def test_what_ranks_print_and_log_goes_to_stderr(
    make_crew: Any, on_all: OnAll, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """In Ray's files of the process, from where Ray takes it to the driver's stderr, with the rank's name in front."""
    caplog.set_level(logging.WARNING)
    caplog.set_level(logging.DEBUG, logger="acme.chatty")

    def speak(worker: Any) -> str:
        print("to stdout")
        os.write(1, b"native\n")
        logging.getLogger("acme.chatty").debug("told")
        logging.getLogger("acme.other").info("not told")
        sys.stderr.flush()
        return os.readlink("/proc/self/fd/2")

    crew = make_crew(1)
    (file,) = on_all(crew, speak)
    lines = Path(file).read_text().splitlines()
    said = ("to stdout", "native", "DEBUG acme.chatty: told", "INFO acme.other: not told")
    assert [line for line in lines if line in said] == list(said[:3])
    assert any(line.endswith(":actor_name:rank 0") for line in lines)


# -- losses ------------------------------------------------------------------------------------------------------------


def test_a_rank_that_is_killed_is_told_once_and_nothing_is_left(make_crew: Any, wait_until: Any) -> None:
    crew = make_crew(2)
    folder, (_, place) = crew.worlds[0].rendezvous, crew.places
    os.kill(place.pid, signal.SIGKILL)
    wait_until(lambda: bool(crew.losses))
    text = str(crew.losses[0])
    assert text.startswith(
        f"worker rank 1 (process {place.pid} on node {place.node_ip} ({place.hostname}, {place.node_id[:8]})) has"
    )
    assert "has ended: Worker unexpectedly exits" in text
    crew.stop(hurry=True)
    assert len(crew.losses) == 1
    wait_until(lambda: not os.path.exists(folder))


DRIVER = """
import sys, time, pickle
from pegboard.config import EngineConfig
from pegboard.plugins import PluginHost, compose
from pegboard.testing.ranked_model import RankedPlugin
from pegboard.wire import World
from pegboard_executor_ray.crew import Crew
from pegboard_executor_ray.options import Options

config = EngineConfig(model="scripted", executor={"name": "ray", "worker": sys.argv[2], "tensor_parallel_size": 2})
composition = compose(config, PluginHost.load(config.plugins, extra={"ranked": RankedPlugin()}))
crew = Crew(composition, Options(address=sys.argv[1]), World(tp_size=2), lambda loss: None)
print(*[place.pid for place in crew.places], crew.worlds[0].rendezvous, flush=True)
time.sleep(600)
"""


def test_an_engine_s_process_that_is_killed_leaves_nothing(
    two_nodes: Any, wait_until: Any, groups: Callable[[], list[str]]
) -> None:
    command = [sys.executable, "-c", DRIVER, two_nodes.address, "pegboard.testing.rpc_worker:RpcWorker"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        assert driver.stdout is not None
        *pids, folder = driver.stdout.readline().split()
        assert os.path.isdir(folder)
        driver.kill()
    wait_until(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids))
    wait_until(lambda: not os.path.exists(folder) and not groups())


def test_ray_that_is_shut_down_under_an_engine(make_crew: Any, two_nodes: Any, wait_until: Any) -> None:
    crew = make_crew(1)
    two_nodes.disconnect()
    wait_until(lambda: bool(crew.losses))
    crew.stop()
    assert not ray.is_initialized()
    two_nodes.connect()
    assert len(crew.losses) == 1


def test_ray_that_is_shut_down_while_it_is_waited_for(make_crew: Any, two_nodes: Any) -> None:
    crew = make_crew(1)
    ending = threading.Timer(0.3, two_nodes.disconnect)
    ending.start()
    with pytest.raises((Exception, SystemExit)) as caught:
        wait(crew._stays, 60)
    ending.join()
    two_nodes.connect()
    assert raised_by_ray(caught.value) or isinstance(caught.value, AssertionError), caught.value


@pytest.mark.parametrize("how", ["os._exit(3)", "os.abort()"])
def test_ranks_that_end_by_themselves(make_crew: Any, wait_until: Any, how: str) -> None:
    from pegboard_executor_mp.messages import Request
    from pegboard_executor_mp.packing import pack

    crew = make_crew(1, options=FAR)
    code = f"import os; {how}"
    request = Request(0, pack(lambda worker: exec(code)), pack(((), {})), None, None)
    crew.actors[0].call.remote(tuple(request))
    wait_until(lambda: bool(crew.losses))
    assert f"worker rank 0 (process {crew.places[0].pid} on node" in str(crew.losses[0])


class Unwilling(RpcWorker):
    def __init__(self, config: Any, composition: Any, world: Any) -> None:
        super().__init__(config, composition, world)
        if self.world.rank == 1:
            raise SystemExit("odd-17")


class Slow(RpcWorker):
    def __init__(self, config: Any, composition: Any, world: Any) -> None:
        super().__init__(config, composition, world)
        time.sleep(60)


class Clinging(RpcWorker):
    def shutdown(self) -> None:
        time.sleep(60)


class Plugin:
    """Goes to the ranks by value."""

    @hookimpl
    def workers(self) -> list[WorkerProvider]:
        classes = {"unwilling": Unwilling, "slow": Slow, "clinging": Clinging}
        return [WorkerProvider(name=name, target=found) for name, found in classes.items()]


def test_a_worker_that_cannot_be_made(make_crew: Any) -> None:
    """Its group goes, and its error names rank, node and cause, whatever class that has."""
    with pytest.raises(WorkerError) as caught:
        make_crew(2, plugins={"own": Plugin()}, worker="unwilling")
    assert (caught.value.rank, caught.value.error_type) == (1, "SystemExit")
    assert "odd-17 (on node " in str(caught.value)
    assert "in __init__" in caught.value.traceback_text


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"runtime_env": {"env_vars": {"A": 1}}}, "must be of type"),
        ({"runtime_env": {"working_dir": "/nowhere"}}, "not a valid path"),
        ({"num_cpus": 0.00001}, "precision"),
    ],
)
def test_what_ray_does_not_take(make_crew: Any, groups: Callable[[], list[str]], wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(EngineStartError, match=f"{why}.*; see runtime_env, .* of plugins.executor_ray"):
        make_crew(1, options=wrong)
    assert groups() == []


def test_names_are_in_the_namespace_that_is_configured(make_crew: Any) -> None:
    crew = make_crew(1, options={"namespace": "odd name"})
    assert ray.get_actor(f"{crew._name}-rank0", namespace="odd name") == crew.actors[0]


def test_a_start_that_takes_too_long(make_crew: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew_module, "TELL_SECONDS", 0.5)
    with pytest.raises(TimeoutError, match=r"rank 0 has no worker after plugins\.executor_ray\.start_timeout=4 s"):
        make_crew(1, plugins={"own": Plugin()}, worker="slow", options={"start_timeout": 4})
    assert "still starting: rank 0 has no worker yet" in caplog.text


def test_stop_does_not_wait_for_a_worker_that_hangs(make_crew: Any) -> None:
    crew = make_crew(1, plugins={"own": Plugin()}, worker="clinging", options={"shutdown_timeout": 0.5})
    crew.stop()
    assert not crew.losses
