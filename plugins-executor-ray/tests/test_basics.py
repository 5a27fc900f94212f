"""Environment, places, what is told of a loss, the janitor: without a cluster."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from pydantic import ValidationError
from ray import exceptions

from pegboard.engine.errors import EngineStartError
from pegboard_executor_ray import cluster
from pegboard_executor_ray.crew import needs
from pegboard_executor_ray.environment import Surroundings, carried
from pegboard_executor_ray.janitor import Janitor
from pegboard_executor_ray.loss import how_it_ended, raised_by_ray, remedy
from pegboard_executor_ray.options import Options
from pegboard_executor_ray.place import Place, check_addresses, visible_devices

# -- environment -------------------------------------------------------------------------------------------------------

DRIVERS = {"ACME": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "0", "RAY_ADDRESS": "x", "LOCAL_RANK": "3", "PATH": "/bin"}


def test_ranks_get_all_variables_but_those_of_a_node() -> None:
    assert carried(DRIVERS, [], []) == {"ACME": "1", "HF_HUB_OFFLINE": "1"}
    assert carried(DRIVERS, ["HF_*", "ACME"], []) == {}
    assert carried(DRIVERS, [], ["PATH", "LOCAL_*"]) == {"ACME": "1", "HF_HUB_OFFLINE": "1", "LOCAL_RANK": "3", "PATH": "/bin"}
    assert carried(DRIVERS, ["PATH"], ["PATH", "LOCAL_*"]) == {"ACME": "1", "HF_HUB_OFFLINE": "1", "LOCAL_RANK": "3"}


PYTHONPATH = os.pathsep.join(sys.path)
ENTER = """
import json, os, pickle, sys
told = pickle.load(sys.stdin.buffer)
sys.path.append("/of/the/node")
told.enter()
print(json.dumps([os.environ.get("ACME"), os.environ.get("NODES"), os.environ["PATH"], os.getcwd(), sys.path]))
"""


def entered(told: Surroundings, folder: Path) -> list[Any]:
    """What a fresh process looks like that started in ``folder`` and has entered ``told``."""
    environ = {"PATH": "/usr/bin", "NODES": "own", "PYTHONPATH": PYTHONPATH}
    run = [sys.executable, "-c", ENTER]
    done = subprocess.run(run, input=pickle.dumps(told), capture_output=True, env=environ, cwd=folder, timeout=60, check=True)
    found: list[Any] = json.loads(done.stdout)
    return found


def test_a_rank_looks_like_the_engine_s_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in ("here", "there", "modules"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("ACME", "17")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", ["", "modules", str(tmp_path / "modules"), "/nowhere", *sys.path, Path("/no/text")])
    acme, nodes, path, folder, import_path = entered(Surroundings.here([], [], {}), tmp_path / "there")
    assert (acme, nodes, path, folder) == ("17", "own", "/usr/bin", str(tmp_path / "here"))
    assert import_path[:2] == [str(tmp_path / "here"), str(tmp_path / "modules")]
    assert import_path[-1] == "/of/the/node"
    assert "/nowhere" not in import_path


def test_a_runtime_env_with_code_goes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACME", "17")
    monkeypatch.syspath_prepend(str(tmp_path))
    runtime_env = {"working_dir": "/somewhere", "env_vars": {"ACME": "18"}}
    acme, _, _, folder, import_path = entered(Surroundings.here([], [], runtime_env), tmp_path)
    assert acme is None, "Ray sets it"
    assert folder == str(tmp_path)
    assert import_path.index("/of/the/node") < import_path.index(str(tmp_path))


def test_files_that_a_rank_lacks_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    told = Surroundings.here([], [], {}, files=["model", "no-file-but-a-name"])
    assert told.files == (str(tmp_path / "model"),)
    (tmp_path / "model").rmdir()
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path}/model, where the engine has its model, does not exist here.*share"):
        told.enter()


# -- places ------------------------------------------------------------------------------------------------------------


def place(node: str = "a", ip: str = "10.0.0.1", network: str = "x", devices: tuple[str, ...] = ()) -> Place:
    return Place(node, ip, f"host-{node}", 1, devices, network)


def test_hosts_need_addresses_of_their_own() -> None:
    check_addresses([place("a"), place("a"), place("b"), place("c", "10.0.0.2", "y")])
    with pytest.raises(
        EngineStartError, match=r"node 10\.0\.0\.1 \(host-a, a\) and node 10\.0\.0\.1 \(host-c, c\) are different"
    ):
        check_addresses([place("a"), place("c", network="y")])


def test_ranks_see_the_devices_of_their_node_by_local_rank() -> None:
    places = [place("a", devices=("3",)), place("a", devices=("1",)), place("b", devices=("3",)), place("c")]
    assert [visible_devices(places, node) for node in "abc"] == [("3", "1"), ("3",), ()]
    with pytest.raises(EngineStartError, match=r"ranks 0, 1 on node .* share devices \(3, 3\).*num_gpus to 1"):
        visible_devices([places[0], places[0]], "a")


def test_what_a_ray_of_the_engine_s_own_can_never_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 1.0})
    cluster._check_own({"CPU": 4, "GPU": 0.5}, 2)
    there = "the Ray that was started on this machine has GPU: 1"
    with pytest.raises(EngineStartError, match=rf"reserve 2 x GPU: 1, and {there}; set plugins\.executor_ray\.address"):
        cluster._check_own({"CPU": 1, "GPU": 1}, 2)


# -- what is told of a loss ----------------------------------------------------------------------------------------------

DIED = """The actor died unexpectedly before finishing this task.
	class_name: RankActor
	pid: 25264
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly \
exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed by the OOM killer"""


def test_how_an_actor_has_ended() -> None:
    unexpected = "has ended: Worker unexpectedly exits with a connection error code 2. End of file."
    assert how_it_ended(RuntimeError(DIED)) == unexpected
    node = "The actor is dead because its node has died. Node Id: ab\n\tthe actor's node was terminated unexpectedly."
    assert "its node has died" in how_it_ended(RuntimeError(node))
    gone = exceptions.ActorUnavailableError("The actor is temporarily unavailable: RpcError: reset by peer rpc_code: 14", None)
    assert how_it_ended(gone) == "cannot be reached any more (RpcError: reset by peer rpc_code: 14.)"
    assert len(how_it_ended(RuntimeError("x" * 10_000))) < 1000


def test_what_to_do_about_packages_that_are_missing() -> None:
    inner = "Traceback (most recent call last):\n  File x\nModuleNotFoundError: No module named 'acme'\n\nAn error occurred"
    missing = RuntimeError(f"The actor with name RankActor failed to import on the worker. This may be because:\n\n{inner}")
    assert how_it_ended(missing) == "cannot import what a rank needs: ModuleNotFoundError: No module named 'acme'"
    assert "every node needs the packages" in remedy(missing)
    assert remedy(RuntimeError("boom")) == ""


# -- the janitor ---------------------------------------------------------------------------------------------------------

KEPT = """
import sys, time
from pegboard_executor_ray.janitor import Janitor
janitor = Janitor("rm", "-rf", "--", *sys.argv[1:])
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_janitor_cleans_up_after_a_process_that_was_ended(tmp_path: Path, number: signal.Signals) -> None:
    made, other = tmp_path / "it's made", tmp_path / "other"
    for folder in (made, other):
        folder.mkdir()
        (folder / "file").write_text("")
    with subprocess.Popen([sys.executable, "-c", KEPT, str(made)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert made.exists()
        process.send_signal(number)
        process.wait(10)
    end = time.monotonic() + 10
    while made.exists():
        assert time.monotonic() < end, "nobody came"
        time.sleep(0.01)
    assert other.exists()


def test_a_janitor_that_is_sent_home_does_nothing(tmp_path: Path) -> None:
    made = tmp_path / "made"
    needed, other = (Janitor("sh", "-c", f'echo "$WHO" >> {made}', environment={"WHO": who}) for who in ("needed", "other"))
    other.send_home()
    other.dismiss()
    needed.dismiss()
    end = time.monotonic() + 10
    while not made.exists() or not made.read_text():
        assert time.monotonic() < end, "nobody came"
        time.sleep(0.01)
    assert made.read_text() == "needed\n"


# -- errors out of ray ---------------------------------------------------------------------------------------------------


def test_what_ray_raises_is_told_from_what_others_raise() -> None:
    def error_of(action: Callable[[], object]) -> BaseException:
        with pytest.raises(BaseException) as caught:
            action()
        return caught.value

    assert raised_by_ray(error_of(lambda: ray.remote(3)))
    assert not raised_by_ray(error_of(lambda: sys.exit(0)))
    assert not raised_by_ray(exceptions.RaySystemError("never raised"))


def test_ranks_reserve_something(compose: Any) -> None:
    def need(options: dict[str, Any], **executor: Any) -> dict[str, float]:
        composition = compose(2, options=options, **executor)
        return needs(composition.options("executor_ray"), composition)

    assert need({}) == {"CPU": 1}
    assert need({}, num_threads=4) == {"CPU": 4}
    assert need({"num_cpus": 0.5, "num_gpus": 1, "resources": {"llm": 2}}, num_threads=4) == {"CPU": 0.5, "GPU": 1, "llm": 2}
    with pytest.raises(EngineStartError, match=r"set plugins\.executor_ray\.num_cpus, num_gpus or resources"):
        need({"num_cpus": 0})


# -- options -----------------------------------------------------------------------------------------------------------


def test_options() -> None:
    options = Options(resources={"llm_worker": 1}, bundle_indices=[2, 1])  # type: ignore[arg-type]
    assert (options.strategy, options.bundle_indices, options.num_cpus) == ("PACK", (2, 1), None)
    resources: list[dict[str, Any]] = [{"resources": {"x": 0}}, {"resources": {"CPU": 1}}]
    for wrong in (*resources, {"num_gpus": 2}, {"strategy": "TIGHT"}, {"bundle_indices": [-1]}, {"adress": "x"}):
        with pytest.raises(ValidationError):
            Options(**wrong)  # type: ignore[arg-type]
