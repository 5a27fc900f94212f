"""Calls through the graph beside what the contract says: payloads, order, threads, errors of one rank while others wait."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.dag import DAGContext

from pegboard.contracts.executor import ExecutorFailed, WorkerError
from pegboard.testing.conformance.executor import PATIENCE, plan
from pegboard.testing.rpc_worker import RpcWorker
from pegboard_executor_ray.executor import RayExecutor
from pegboard_executor_ray.graph import ROOM

MakeExecutor = Callable[..., RayExecutor]
BUFFER = 64 << 10


@pytest.fixture
def two(shared: MakeExecutor) -> RayExecutor:
    """Two ranks with small buffers, for the tests that break nothing."""
    return shared(2, options={"buffer_bytes": BUFFER})


def test_every_rank_has_its_own_process_and_its_place(two: RayExecutor) -> None:
    def place(worker: Any) -> Any:
        world = worker.world
        return os.getpid(), world.rank, world.local_rank, world.tp_size, world.pp_size, world.rendezvous

    pids, *places = zip(*two.collective_rpc(place), strict=True)
    assert len({*pids, os.getpid()}) == 3
    assert places[:4] == [(0, 1), (0, 1), (2, 2), (1, 1)]
    assert len(set(places[4])) == 1


def test_some_ranks_alone(two: RayExecutor) -> None:
    assert [reply["rank"] for reply in two.collective_rpc("echo", (1,), ranks=[1])] == [1]
    assert two.collective_rpc("echo", (1,), ranks=[]) == []
    with pytest.raises(ValueError, match="has the ranks 0 to 1"):
        two.collective_rpc("echo", (1,), ranks=[2])


def test_payloads_of_any_size_in_both_directions(two: RayExecutor) -> None:
    rng = random.Random(0)
    largest = BUFFER - ROOM
    for size in (0, 1, largest - 500, *range(largest - 300, largest + 30, 40), BUFFER, 17, 20 * BUFFER):
        data = rng.randbytes(size)
        for reply in two.collective_rpc("echo", (data,), timeout=PATIENCE):
            assert reply["value"] == data
    assert two.execute_model(plan(1)).step_id == 1


def test_many_large_calls_at_once(two: RayExecutor) -> None:
    data = [os.urandom(size) for size in (BUFFER, 10, 5 * BUFFER, 0)] * 5
    futures = [two.collective_rpc("echo", (each,), non_block=True) for each in data]
    for each, future in zip(data, futures, strict=True):
        assert [reply["value"] for reply in future.result(PATIENCE)] == [each, each]


def test_large_steps(two: RayExecutor) -> None:
    rows = BUFFER // 8
    futures = [two.execute_model(plan(i, rows=n), non_block=True) for i, n in enumerate((1, rows, 2, 3 * rows, 3))]
    for future, n in zip(futures, (1, rows, 2, 3 * rows, 3), strict=True):
        assert future.result(PATIENCE).sampled_token_ids == [[RpcWorker.TOKEN]] * n


def test_large_replies_that_nobody_waits_for_are_not_kept(two: RayExecutor) -> None:
    def large_and_late(worker: Any) -> bytes:
        time.sleep(0.3)
        return bytes(10 * BUFFER)

    with pytest.raises(TimeoutError):
        two.collective_rpc(large_and_late, timeout=0.1)
    assert two.collective_rpc("echo", (1,), timeout=PATIENCE)[0]["value"] == 1
    actors = two._fleet._crew.actors
    kept = [actor.__ray_call__.remote(lambda rank: (len(rank._kept), len(rank._brought))) for actor in actors]
    assert ray.get(kept, timeout=PATIENCE) == [(0, 0), (0, 0)]


def test_large_replies_to_a_call_that_fails_elsewhere_are_not_kept(two: RayExecutor) -> None:
    def large_or_fails(worker: Any) -> bytes:
        if worker.world.rank == 1:
            raise ValueError("odd-17")
        return bytes(10 * BUFFER)

    for _ in range(20):
        with pytest.raises(WorkerError, match="odd-17"):
            two.collective_rpc(large_or_fails, timeout=PATIENCE)
    actor = two._fleet._crew.actors[0]
    in_flight, kept = ray.get(actor.__ray_call__.remote(lambda rank: (rank._in_flight, len(rank._kept))), timeout=PATIENCE)
    assert kept <= in_flight < 20
    for _ in range(in_flight):
        two.collective_rpc("echo", (1,), timeout=PATIENCE)
    assert ray.get(actor.__ray_call__.remote(lambda rank: len(rank._kept)), timeout=PATIENCE) == 0


def test_replies_do_not_depend_on_the_memory_that_they_came_in(two: RayExecutor) -> None:
    import numpy as np

    def array(worker: Any, value: int) -> Any:
        return np.full(1000, value)

    first = two.collective_rpc(array, (1,))
    for value in range(2, 12):
        two.collective_rpc(array, (value,))
    first[0][0] = 17  # writable
    assert first[0].tolist() == [17] + [1] * 999
    assert first[1].tolist() == [1] * 1000


class Notes(RpcWorker):
    """Writes down what it does, and in which thread."""

    def __init__(self, config: Any, composition: Any, world: Any) -> None:
        super().__init__(config, composition, world)
        self.done: list[Any] = []
        self.threads: set[int] = set()

    def init_device(self) -> None:
        super().init_device()
        self.threads.add(threading.get_ident())

    def execute_model(self, plan: Any) -> Any:
        self.done.append(plan.step_id)
        self.threads.add(threading.get_ident())
        return super().execute_model(plan)


@pytest.mark.parametrize("stages", [1, 2])
def test_calls_and_steps_run_in_one_thread_in_the_order_made(
    stages: int, make_executor: MakeExecutor, plugin_with: Callable[..., Any]
) -> None:
    ranks = {1: {"ranks": 2}, 2: {"ranks": 1, "pipeline_parallel_size": 2}}[stages]
    executor = make_executor(**ranks, worker="own", plugins=plugin_with(Notes))
    assert executor.max_concurrent_batches == stages
    assert executor.supports_pp
    assert executor.supports_async_scheduling
    told: list[int] = []

    def note(worker: Any, what: int) -> None:
        worker.done.append(what)
        worker.threads.add(threading.get_ident())

    rng = random.Random(0)
    futures = [
        executor.execute_model(plan(number, sleep=0.002, rank=number % 2), non_block=True)
        if rng.random() < 0.5
        else executor.collective_rpc(note, (number,), non_block=True)
        for number in range(60)
    ]
    for number, future in enumerate(futures):
        future.add_done_callback(lambda _, number=number: told.append(number))
    for future in futures:
        future.result(PATIENCE)
    executor.check_health()
    assert sorted(told) == told == list(range(60))
    for done, threads in executor.collective_rpc(lambda worker: (worker.done, len(worker.threads))):
        assert done == list(range(60))
        assert threads == 1


def test_a_rank_that_is_not_asked_may_be_late(two: RayExecutor) -> None:
    """It is still in the call before."""

    def late(worker: Any) -> None:
        time.sleep(0.6 if worker.world.rank else 0.0)

    with pytest.raises(TimeoutError, match="rank 1"):
        two.collective_rpc(late, timeout=0.3)
    waiting = two.collective_rpc("echo", (1,), timeout=0.1, ranks=[0], non_block=True)
    with pytest.raises(TimeoutError, match=r"echo: no answer from rank 1 within"):
        waiting.result(PATIENCE)
    two.collective_rpc("echo", (1,), timeout=PATIENCE)


def test_after_errors_every_call_still_gets_its_own_reply(two: RayExecutor) -> None:
    def some_raise(worker: Any, number: int) -> int:
        if number % 3 == worker.world.rank:
            raise ValueError(f"odd-{number}")
        return number

    futures = [two.collective_rpc(some_raise, (number,), non_block=True) for number in range(30)]
    for number, future in enumerate(futures):
        if number % 3 < 2:
            with pytest.raises(WorkerError, match=f"odd-{number}"):
                future.result(PATIENCE)
        else:
            assert future.result(PATIENCE) == [number, number]


# -- stages ------------------------------------------------------------------------------------------------------------


def test_stages_are_under_way_at_once(make_executor: MakeExecutor, tmp_path: Path) -> None:
    """The first stage may wait for the second one to take what it sends, and be a step ahead of it."""
    executor = make_executor(1, pipeline_parallel_size=2)
    first, second, again = (str(tmp_path / name) for name in ("first", "second", "again"))
    steps = [plan(1), plan(2)]
    steps[0].ext = {"rpc": {"meet": {0: (first, second), 1: (second, again)}}}
    steps[1].ext = {"rpc": {"meet": {0: (again, None)}}}
    futures = [executor.execute_model(step, non_block=True) for step in steps]
    assert [future.result(PATIENCE).step_id for future in futures] == [1, 2]


# -- limits ------------------------------------------------------------------------------------------------------------


def test_health_is_a_round_trip_with_a_deadline_and_a_step_that_overruns_it_is_the_end(
    make_executor: MakeExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    executor = make_executor(2, step_timeout=0.5)
    causes: list[BaseException] = []
    executor.register_failure_callback(causes.append)
    executor.check_health()
    executor.collective_rpc("sleep_then", (1.0, None), ranks=[0], non_block=True)
    with pytest.raises(ExecutorFailed, match="check_health: no answer from rank 0 "):
        executor.check_health()
    executor.collective_rpc("echo", (1,), timeout=PATIENCE)
    executor.check_health()
    with pytest.raises(TimeoutError, match="execute_model: no answer from rank 1 "):
        executor.execute_model(plan(1, sleep=600.0, rank=1))
    assert "executor.step_timeout" in str(causes[0])
    with pytest.raises(ExecutorFailed, match="no answer from rank 1"):
        executor.check_health()
    executor.shutdown()
    told = [record.message for record in caplog.records if "in the middle of a call" in record.message]
    assert len(told) == 1
    assert told[0].startswith("rank 1 ")
    assert "rpc_worker.py" in told[0], "where it hangs"


def test_settings_of_ray_s_graphs(make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own limit, ten seconds by default, does not apply; what others' graphs are made with stays."""
    settings = DAGContext.get_current()
    monkeypatch.setattr(settings, "get_timeout", 0.2)
    before = settings.buffer_size_bytes
    executor = make_executor(2, options={"buffer_bytes": "128KiB"})
    assert settings.buffer_size_bytes == before
    assert executor.execute_model(plan(1, sleep=1.0)).step_id == 1
