"""How ranks of the compiled graph start and end when nothing breaks, or somebody interrupts."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from pegboard.contracts.executor import ExecutorFailed, WorkerError
from pegboard.plugins import Composition
from pegboard.testing.conformance.executor import PATIENCE, plan
from pegboard.testing.rpc_worker import RpcWorker
from pegboard_executor_mp.calls import Deadline
from pegboard_executor_ray.executor import RayExecutor

MakeExecutor = Callable[..., RayExecutor]
PluginWith = Callable[..., dict[str, object]]
Told = Callable[[], list[str]]
WaitUntil = Callable[..., None]
NothingLeft = Callable[[list[int]], None]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    path = tmp_path / "told"
    path.touch()
    monkeypatch.setenv("TELLS", str(path))
    return lambda: sorted(path.read_text().splitlines())


# -- starting ----------------------------------------------------------------------------------------------------------


class CannotLoad(RpcWorker):
    def load_model(self) -> None:
        if self.world.rank == 1:
            raise ValueError("odd-17: the file is truncated")
        time.sleep(600)


class Hangs(RpcWorker):
    """In ``load_model``, and says when it is there."""

    def load_model(self) -> None:
        if self.world.rank == 1:
            Path(os.environ["TELLS"]).write_text("hangs")
            time.sleep(600)


def test_what_a_rank_raises_at_the_start_is_raised_here(
    make_executor: MakeExecutor, plugin_with: PluginWith, nothing_left: NothingLeft
) -> None:
    threads = threading.active_count()
    with pytest.raises(WorkerError, match=r"worker rank 1 failed: ValueError: odd-17") as caught:
        make_executor(2, worker="own", plugins=plugin_with(CannotLoad))
    assert ", in load_model\n" in caught.value.traceback_text
    assert threading.active_count() == threads
    nothing_left([])


def test_a_rank_that_hangs_at_the_start(
    make_executor: MakeExecutor,
    plugin_with: PluginWith,
    nothing_left: NothingLeft,
    told: Told,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pegboard_executor_mp.fleet_executor.Deadline", lambda seconds: Deadline(3.0))
    with pytest.raises(TimeoutError, match=r"executor_ray\.start_timeout=600\.0 s: load_model: no answer from rank"):
        make_executor(2, worker="own", plugins=plugin_with(Hangs))
    assert [r.message.split(":")[0] for r in caplog.records if r.name.startswith("pegboard_executor_ray")] == [
        "rank 1 is stopped in the middle of a call"
    ]
    nothing_left([])


def test_an_interrupt_while_ranks_start_leaves_nothing(
    make_executor: MakeExecutor, plugin_with: PluginWith, nothing_left: NothingLeft, wait_until: WaitUntil, told: Told
) -> None:
    def interrupt() -> None:
        wait_until(told)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        make_executor(2, worker="own", plugins=plugin_with(Hangs))
    nothing_left([])


# -- while they run ----------------------------------------------------------------------------------------------------


def test_an_interrupt_ends_the_waiting_alone(shared: MakeExecutor) -> None:
    executor = shared(2)

    def interrupt() -> None:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        executor.collective_rpc("sleep_then", (1.0, "unheard"))
    assert executor.collective_rpc("echo", (1,), timeout=PATIENCE)[1]["value"] == 1
    assert executor.execute_model(plan(1)).step_id == 1


def test_two_engines_in_one_ray(shared: MakeExecutor, make_executor: MakeExecutor) -> None:
    first, second = shared(2), make_executor(1, pipeline_parallel_size=2)
    pids = [pid for executor in (first, second) for pid in executor.collective_rpc(lambda worker: os.getpid())]
    assert len(set(pids)) == 4
    futures = [executor.execute_model(plan(i, sleep=0.01), non_block=True) for i in range(10) for executor in (first, second)]
    assert [future.result(PATIENCE).step_id for future in futures] == [i // 2 for i in range(20)]
    second.shutdown()
    assert first.execute_model(plan(1)).step_id == 1


def test_inside_an_actor(compose: Callable[..., Composition], nothing_left: NothingLeft) -> None:
    """As in a replica of Ray Serve."""

    @ray.remote
    class Holder:
        def steps(self, composition: bytes) -> Any:
            import pickle

            executor = pickle.loads(composition).create("executor")
            steps = [executor.execute_model(plan(i), non_block=True) for i in range(10)]
            told = [step.result(60).step_id for step in steps]
            executor.shutdown()
            return told

    import cloudpickle

    holder = Holder.options(num_cpus=0).remote()
    composition = cloudpickle.dumps(compose(2))
    assert ray.get(holder.steps.remote(composition), timeout=PATIENCE) == list(range(10))
    ray.kill(holder)
    nothing_left([])


# -- ending ------------------------------------------------------------------------------------------------------------


class Tells(RpcWorker):
    """Writes down that it was shut down, and whether in the thread that it lived in."""

    def init_device(self) -> None:
        super().init_device()
        self.thread = threading.get_ident()

    def shutdown(self) -> None:
        with open(os.environ["TELLS"], "a") as file:
            file.write(f"{self.world.rank} {threading.get_ident() == self.thread}\n")


def test_shutdown_lets_workers_shut_down(make_executor: MakeExecutor, plugin_with: PluginWith, told: Told) -> None:
    executor = make_executor(2, worker="own", plugins=plugin_with(Tells))
    running = executor.collective_rpc("sleep_then", (0.5, None), non_block=True)
    time.sleep(0.2)
    waiting = executor.collective_rpc("sleep_then", (600, None), non_block=True)
    executor.shutdown()
    for future in (running, waiting):
        with pytest.raises(ExecutorFailed, match="shut down"):
            future.result(PATIENCE)
    assert told() == ["0 True", "1 True"]


def test_a_rank_that_does_not_end_is_killed(
    make_executor: MakeExecutor, plugin_with: PluginWith, wait_until: WaitUntil, told: Told
) -> None:
    executor = make_executor(2, worker="own", plugins=plugin_with(Tells), options={"shutdown_timeout": 2.0})

    def stubborn(worker: Any) -> None:
        Path(os.environ["TELLS"]).write_text("stubborn\n")
        time.sleep(600)

    executor.collective_rpc(stubborn, ranks=[1], non_block=True)
    wait_until(told)
    executor.shutdown()
    assert told() == ["0 True", "stubborn"]


def test_a_normal_end_is_quiet(
    make_executor: MakeExecutor, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    capfd.readouterr()
    executor = make_executor(2)
    causes: list[BaseException] = []
    executor.register_failure_callback(causes.append)
    executor.collective_rpc("echo", (1,))
    executor.shutdown()
    time.sleep(0.5)  # what Ray prints comes late
    assert causes == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert [record for record in caplog.records if record.name.startswith("ray.")] == []
    assert capfd.readouterr() == ("", "")


def test_shutdown_from_a_failure_callback(make_executor: MakeExecutor) -> None:
    executor = make_executor(2)
    done = threading.Event()
    executor.register_failure_callback(lambda cause: (executor.shutdown(), done.set()))
    with pytest.raises(ExecutorFailed, match="worker rank 1 "):
        executor.collective_rpc(lambda worker: os._exit(3), ranks=[1], timeout=PATIENCE)
    assert done.wait(4.0), "nothing waits for what waits for it"


def test_a_forgotten_executor_ends_its_ranks(compose: Callable[..., Composition], nothing_left: NothingLeft) -> None:
    executor = compose(2).create("executor")
    pids = executor.collective_rpc(lambda worker: os.getpid())
    reference = weakref.ref(executor)
    del executor
    gc.collect()
    assert reference() is None
    nothing_left(pids)


SCRIPT = """
import os, sys, time
from pegboard import LLM
from pegboard.testing.ranked_model import RankedPlugin
llm = LLM('scripted', plugins={'ranked': RankedPlugin()}, max_model_len=64,
          executor={'name': 'ray', 'worker': 'pegboard.testing.fakes:RunnerWorker', 'tensor_parallel_size': 2})
print(*llm.collective_rpc(lambda worker: os.getpid()), flush=True)
if sys.argv[1:] == ['threadless']:
    import atexit, threading
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")
    atexit.register(lambda: setattr(threading.Thread, 'start', refuse))
elif sys.argv[1:]:
    time.sleep(600)
"""


@pytest.fixture
def script(two_nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command: an engine of two ranks on the tests' cluster, which ends by itself unless there is an argument more."""
    monkeypatch.setenv("RAY_ADDRESS", two_nodes.address)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return [sys.executable, str(path)]


@pytest.mark.parametrize("how", [[], ["threadless"]], ids=["", "as-python-3.12"])
def test_the_end_of_the_interpreter_is_the_end_of_the_ranks(how: list[str], script: list[str], nothing_left: NothingLeft) -> None:
    done = subprocess.run([*script, *how], capture_output=True, text=True, timeout=PATIENCE, check=True)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert "Traceback" not in done.stderr
    nothing_left(pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_the_engines_process_is_the_end_of_the_ranks(
    script: list[str], number: int, nothing_left: NothingLeft
) -> None:
    with subprocess.Popen([*script, "stay"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            pids = [int(pid) for pid in process.stdout.readline().split()]
            assert len(pids) == 2
        finally:
            process.send_signal(number)
    nothing_left(pids)
