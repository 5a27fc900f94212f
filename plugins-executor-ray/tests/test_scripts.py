"""Whole engines from scripts without a main guard: on a Ray of their own, and on a cluster of `ray start` that grows."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pegboard.testing.checkpoints import make_checkpoint

pytestmark = pytest.mark.slow
LIMIT = 120.0
RAY = str(Path(sys.executable).with_name("ray"))

SCRIPT = """
import json, os, sys
from pegboard import LLM, SamplingParams
from pegboard.plugins import PluginError, WorkerProvider, hookimpl
from pegboard.testing.fakes import RunnerWorker
from pegboard.testing.ranked_model import RankedPlugin

def helper():
    return 17

class OwnWorker(RunnerWorker):
    def load_model(self):
        super().load_model()
        print("a rank speaks")

class Plugin(RankedPlugin):
    @hookimpl
    def workers(self):
        return [WorkerProvider(name="own", target=OwnWorker)]

def start(model="scripted", ranks=2, worker="own", plugins={}, **options):
    return LLM(model, max_model_len=64, plugins={"ranked": Plugin(), "executor_ray": options, **plugins},
        executor={"name": "ray", "worker": worker, "tensor_parallel_size": ranks, "communicator": "torch_distributed"})

def work(llm):
    print(llm.generate("prompt", SamplingParams(max_tokens=5, temperature=0))[0].outputs[0].token_ids)
    print(llm.collective_rpc(lambda worker: (type(worker).__name__, helper())))
    llm.shutdown()
"""
WORKED = r"\[.*\]\n\[\('OwnWorker', 17\)(, \('OwnWorker', 17\))*\]\n"


def run(tmp_path: Path, code: str, *, status: int = 0, **environment: str) -> tuple[str, str]:
    """(stdout, stderr) of SCRIPT and ``code``."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + code)
    command, variables = [sys.executable, str(script)], {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=LIMIT, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


def processes_with(variable: str) -> list[str]:
    """Names of processes that have ``variable``, "NAME=value", in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if variable.encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(process.name())
    return found


# -- a Ray of its own ----------------------------------------------------------------------------------------------------

REFUSED = """
for refused in ({"plugins": {"me": sys.modules["__main__"]}}, {"worker": "__main__:OwnWorker"}):
    try:
        start(address="local", **refused)
    except PluginError as error:
        print(error)
"""


TWO = """
first, second = (start(address="local", ranks=1, num_cpus=0.5) for _ in range(2))
first.shutdown()
work(second)
import ray
assert not ray.is_initialized()
"""


def test_an_engine_with_a_ray_of_its_own(tmp_path: Path) -> None:
    """Which has as many CPUs as the ranks ask for. Objects given in the script go by value; the script's module, and a class in
    it, are refused before anything starts, with what to do instead. Ranks print to stderr. Engines of one process share a Ray:
    it goes with the last one. Everything ends then."""
    code = f"{REFUSED}\nwork(start(address='local', ranks=3, num_cpus=50, resources={{'llm': 1}}))\n{TWO}"
    out, err = run(tmp_path, code, WHOSE_TEST=str(tmp_path))
    first, second, *rest = out.splitlines(keepends=True)
    assert re.search(r"plugin 'me' .*the script's own module.*entry point", first)
    assert re.search(r"worker '__main__:OwnWorker' is defined in the script.*entry point", second)
    assert re.fullmatch(WORKED * 2, "".join(rest))
    assert re.search(r"\(rank \d pid=\d+\)\S* a rank speaks", err)
    assert not processes_with(f"WHOSE_TEST={tmp_path}")


# -- a cluster that grows ------------------------------------------------------------------------------------------------


class Nodes:
    """Nodes of one cluster, each started by ``ray start``, and ended with ``stop``."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: the names of sockets are
        self.environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        self._started: list[subprocess.Popen[str]] = []
        head = self.start("--head", "--port=0", "--include-dashboard=false", f"--temp-dir={self.folder}", "--num-cpus=1")
        found = re.search(r"--address='([^']+)'", head)
        assert found is not None, head
        self.address = found[1]

    def join(self, *options: str, within: tuple[str, ...] = ()) -> None:
        self.start(f"--address={self.address}", *options, within=within)

    def start(self, *options: str, within: tuple[str, ...] = ()) -> str:
        """Returns what it says. ``within``: a command that runs it."""
        command = [*within, RAY, "start", "--block", "--object-store-memory=104857600", *options]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=self.environment, start_new_session=True
        )
        self._started.append(process)
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if "Ray runtime started" in said and "ray stop" in line:
                threading.Thread(target=process.stdout.read, daemon=True).start()
                return said
        raise AssertionError(f"no node: {said}")

    def status(self) -> str:
        command = [RAY, "status", f"--address={self.address}"]
        return subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=60, check=True).stdout

    def wait_until_clean(self) -> None:
        """Nothing is reserved, nothing asked for."""
        end = time.monotonic() + 30
        while True:
            status = self.status()
            used = re.findall(r"^ ([\d.]+)/[\d.]+ CPU", status, re.MULTILINE)
            if used and not any(map(float, used)) and "(no resource demands)" in status:
                return
            assert time.monotonic() < end, status
            time.sleep(0.5)

    def stop(self) -> None:
        for process in reversed(self._started):
            process.terminate()
        for process in self._started:
            try:
                process.wait(20)
            finally:
                os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    started = Nodes()
    yield started
    started.stop()


@pytest.fixture
def variables(nodes: Nodes) -> dict[str, str]:
    return {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": nodes.address}


@pytest.mark.long
def test_ranks_that_can_never_be_placed(nodes: Nodes, variables: dict[str, str], tmp_path: Path) -> None:
    out, err = run(tmp_path, "start(ranks=4, placement_timeout=4)", status=1, **variables)
    assert out == ""
    wanted = r"4 x \{CPU: 1\} wanted, \{CPU: 1\} available, of \{CPU: 1\} on 1 node"
    assert re.search(rf"waiting for the Ray cluster, 3 of 4 s: {wanted}", err)
    assert re.search(rf"EngineStartError: .*within plugins\.executor_ray\.placement_timeout=4 s: {wanted}", err)
    assert err.count("Traceback") == 1
    nodes.wait_until_clean()


def test_a_node_that_joins_while_an_engine_waits(nodes: Nodes, variables: dict[str, str], tmp_path: Path) -> None:
    """Then one that lacks the model's folder, in a mount namespace of its own."""
    folder = make_checkpoint(tmp_path / "models" / "tiny")
    hides = ("unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o size=1m tmpfs {folder.parent} && exec "$@"', "sh")
    hidden = subprocess.run([*hides, "true"], capture_output=True, check=False).returncode == 0
    joining = threading.Timer(5.0, nodes.join, ["--num-cpus=4"], {"within": hides if hidden else ()})
    joining.start()
    out, err = run(tmp_path, "work(start(ranks=4, placement_timeout=60))", **variables)
    joining.join()
    assert re.fullmatch(WORKED, out)
    assert "waiting for the Ray cluster" in err
    if hidden:
        code = f"start({str(folder)!r}, worker='pegboard.testing.rpc_worker:RpcWorker', strategy='STRICT_SPREAD')"
        _, err = run(tmp_path, code, status=1, **variables)
        why = rf"FileNotFoundError: {folder}, where the engine has its model, does not exist here; .*that all nodes share"
        assert re.search(rf"WorkerError: worker rank 1 failed: {why} \(on node \S+ \(.*\)\)", err)
    nodes.wait_until_clean()


def test_addresses_where_nobody_answers(tmp_path: Path) -> None:
    code = """
from pegboard.engine.errors import EngineStartError
for address in ("127.0.0.1:1", "ray://127.0.0.1:10001", "nonsense"):
    try:
        start(address=address)
    except EngineStartError as error:
        print(error)
"""
    out, _ = run(tmp_path, code)
    refused, client, nonsense = out.splitlines()
    assert refused.startswith("plugins.executor_ray.address: nobody answers at 127.0.0.1:1: ")
    assert "'ray://127.0.0.1:10001' is no address of a cluster" in client
    assert "ray job submit" in client
    assert nonsense == "plugins.executor_ray.address: 'nonsense' must be 'host:port', 'auto' or 'local'"
