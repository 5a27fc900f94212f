"""Ranks break, with real signals: everybody who waits is told soon, the root cause is named once, nothing is left."""

from __future__ import annotations

import gc
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
from pegboard.testing.conformance.executor import PATIENCE, plan
from pegboard.testing.rpc_worker import RpcWorker
from pegboard_executor_ray.crew import Crew
from pegboard_executor_ray.queue_executor import RayQueueExecutor
from pegboard_executor_ray.queue_rank import QueueRank

MakeExecutor = Callable[..., RayQueueExecutor]
WaitUntil = Callable[..., None]
PluginWith = Callable[[type], dict[str, object]]

NEAR: dict[str, Any] = {"resources": {"near": 1}}
FAR: dict[str, Any] = {"strategy": "STRICT_SPREAD"}
SLOW = pytest.mark.slow


def causes_of(executor: RayQueueExecutor) -> list[BaseException]:
    causes: list[BaseException] = []
    executor.register_failure_callback(causes.append)
    return causes


def check_failed(executor: RayQueueExecutor, causes: list[BaseException], match: str, wait_until: WaitUntil) -> None:
    """Told once, and every later call is refused at once."""
    wait_until(lambda: bool(causes))
    for _ in range(2):
        with pytest.raises(ExecutorFailed, match=match):
            executor.execute_model(plan(1))
        with pytest.raises(ExecutorFailed, match=match):
            executor.check_health()
    executor.shutdown()
    assert len(causes) == 1


@pytest.mark.parametrize(
    ("options", "number", "idle"),
    [
        (NEAR, signal.SIGKILL, False),
        (FAR, signal.SIGKILL, True),
        pytest.param(FAR, signal.SIGTERM, False, marks=SLOW),
    ],
)
def test_a_rank_is_ended(
    options: dict[str, Any], number: int, idle: bool, make_executor: MakeExecutor, wait_until: WaitUntil
) -> None:
    executor = make_executor(2, options=options)
    causes = causes_of(executor)
    pid = executor.collective_rpc(lambda worker: os.getpid())[1]
    step = None if idle else executor.execute_model(plan(1, sleep=600.0), non_block=True)
    call = None if idle else executor.collective_rpc("echo", (1,), non_block=True)
    os.kill(pid, number)
    for future in (step, call):
        if future is not None:
            with pytest.raises(ExecutorFailed, match=f"worker rank 1 .process {pid} on node"):
                future.result(PATIENCE)
    check_failed(executor, causes, f"worker rank 1 .process {pid} on node", wait_until)


@pytest.mark.slow
def test_a_node_is_lost(two_nodes: Any, make_executor: MakeExecutor, wait_until: WaitUntil) -> None:
    cluster = two_nodes._cluster
    node = cluster.add_node(num_cpus=1, object_store_memory=100 << 20, resources={"extra": 1})
    try:
        cluster.wait_for_nodes()
        executor = make_executor(1, options={"resources": {"extra": 1}})
        causes = causes_of(executor)
        step = executor.execute_model(plan(1, sleep=600.0), non_block=True)
    finally:
        cluster.remove_node(node, allow_graceful=False)
    with pytest.raises(ExecutorFailed, match="worker rank 0 "):
        step.result(PATIENCE)
    check_failed(executor, causes, "worker rank 0 .* (is cut off|has ended|cannot be reached)", wait_until)


class LosesItsPeer(RpcWorker):
    """Rank 1 ends in a step; rank 0 is told of that by its communicator, before anybody else hears of it."""

    def execute_model(self, plan: Any) -> Any:
        from pegboard.contracts.communicator import PeerLost

        if self.world.rank == 1:
            time.sleep(0.2)
            os._exit(5)
        raise PeerLost("rank 1 of group tp0 is gone")


def test_the_end_of_a_rank_is_told_before_what_others_make_of_it(make_executor: MakeExecutor, plugin_with: PluginWith) -> None:
    executor = make_executor(2, worker="own", plugins=plugin_with(LosesItsPeer))
    with pytest.raises(ExecutorFailed, match="worker rank 1 "):
        executor.execute_model(plan(1))


def test_a_rank_that_no_longer_hears(make_executor: MakeExecutor, wait_until: WaitUntil) -> None:
    """Its process is well, and Ray content."""
    executor = make_executor(2, options=FAR)
    causes = causes_of(executor)

    def deafen(worker: Any) -> None:
        (actor,) = (found for found in gc.get_objects() if isinstance(found, QueueRank))
        assert actor._requests is not None
        actor._requests.cancel()

    executor.collective_rpc(deafen, ranks=[1], timeout=PATIENCE)
    check_failed(executor, causes, "worker rank 1 .* is cut off from the engine", wait_until)


@pytest.mark.slow
def test_ray_is_shut_down_under_the_engine(two_nodes: Any, make_executor: MakeExecutor, wait_until: WaitUntil) -> None:
    executor = make_executor(2)
    causes = causes_of(executor)
    step = executor.execute_model(plan(1, sleep=600.0), non_block=True)
    ray.shutdown()
    try:
        with pytest.raises(ExecutorFailed):
            step.result(PATIENCE)
        check_failed(executor, causes, "Ray|worker rank", wait_until)
        assert not ray.is_initialized(), "nothing starts another one"
    finally:
        ray.init(address=two_nodes.address, logging_level="warning")


# -- starting ----------------------------------------------------------------------------------------------------------


class BreaksAtTheStart(RpcWorker):
    def load_model(self) -> None:
        if self.world.rank == 1:
            if os.environ["BREAKS"] == "raise":
                raise ValueError("odd-17: the file is truncated")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)


@pytest.mark.parametrize("how", ["raise", pytest.param("end", marks=SLOW)])
def test_at_the_start(
    how: str, make_executor: MakeExecutor, plugin_with: PluginWith, monkeypatch: pytest.MonkeyPatch, groups: Any
) -> None:
    before, threads = groups(), threading.active_count()
    monkeypatch.setenv("BREAKS", how)
    with pytest.raises((WorkerError, ExecutorFailed)) as caught:
        make_executor(2, worker="own", plugins=plugin_with(BreaksAtTheStart))
    expected = {
        "raise": (WorkerError, "worker rank 1 failed: ValueError: odd-17"),
        "end": (ExecutorFailed, "worker rank 1 (process "),
    }
    kind, text = expected[how]
    assert type(caught.value) is kind
    assert text in str(caught.value)
    assert groups() == before
    assert threading.active_count() == threads


def test_ray_is_shut_down_while_ranks_start(two_nodes: Any, make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Ray raises then, ``SystemExit`` for one, is an error of the start."""
    set_up = Crew._set_up

    def shut_down(self: Crew, *more: Any) -> None:
        ray.shutdown()
        set_up(self, *more)

    monkeypatch.setattr(Crew, "_set_up", shut_down)
    try:
        with pytest.raises(ExecutorFailed, match="Ray failed while the ranks were starting; was it shut down meanwhile"):
            make_executor(2)
        assert not ray.is_initialized(), "nothing starts another one"
    finally:
        two_nodes.connect()


def test_too_little_shared_memory(make_executor: MakeExecutor, groups: Any) -> None:
    before = groups()
    with pytest.raises(EngineStartError, match=r"lower plugins\.executor_ray\.chunk_bytes or plugins\.executor_ray\.num_chunks"):
        make_executor(2, options={**NEAR, "chunk_bytes": "2000MiB", "num_chunks": 10_000})
    assert groups() == before


# -- the end of the engine's process ------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, time
from pegboard import LLM
from pegboard.testing.ranked_model import RankedPlugin
llm = LLM('scripted', max_model_len=64,
          plugins={'ranked': RankedPlugin(), 'executor_ray': {'strategy': sys.argv[1]}},
          executor={'name': 'ray-mq', 'worker': 'pegboard.testing.fakes:RunnerWorker', 'tensor_parallel_size': 2})
print(*llm.collective_rpc(lambda worker: os.getpid()), flush=True)
if sys.argv[2:]:
    llm.collective_rpc(time.sleep, (600,))
"""


def test_the_end_of_the_engines_process_is_the_end_of_the_ranks(
    two_nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil, groups: Any
) -> None:
    """Killed in the middle of a call, with one rank here and one elsewhere; and, in the same minute, by itself."""
    monkeypatch.setenv("RAY_ADDRESS", two_nodes.address)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("time.sleep, (600,)", "lambda worker: time.sleep(600)"))
    commands = [[sys.executable, str(path), "STRICT_SPREAD", "stay"], [sys.executable, str(path), "STRICT_PACK"]]
    before = groups()
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands]
    killed, ended = processes
    try:
        assert killed.stdout is not None
        pids = [int(pid) for pid in killed.stdout.readline().split()]
        out, err = ended.communicate(timeout=PATIENCE)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert len(pids) == 2
    assert ended.returncode == 0, err
    assert "Traceback" not in err
    pids += [int(pid) for pid in out.split()]
    assert len(pids) == 4
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    wait_until(lambda: groups() == before)
    owners = [*pids, *(process.pid for process in processes)]
    names = tuple(f"pegboard-{kind}-{pid}-" for kind in ("mq", "mp") for pid in owners)
    wait_until(lambda: not [name for name in os.listdir("/dev/shm") if name.startswith(names)])
