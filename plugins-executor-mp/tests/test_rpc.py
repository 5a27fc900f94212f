"""Calls of the executor beside what its contract says: payloads, subsets of ranks, replies that cannot be loaded, messages."""

from __future__ import annotations

import hashlib
import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import psutil
import pytest

from pegboard.contracts.executor import ExecutorFailed, WorkerError
from pegboard.testing.conformance.executor import PATIENCE, plan
from pegboard_executor_mp import replies
from pegboard_executor_mp.executor import MultiprocExecutor

MakeExecutor = Callable[..., MultiprocExecutor]
CHUNK = 4096


def test_every_rank_has_its_own_process_and_its_place(make_executor: MakeExecutor) -> None:
    executor = make_executor(3)

    def place(worker: Any) -> Any:
        world = worker.world
        folder = world.rendezvous
        return os.getpid(), world.rank, world.local_rank, world.tp_size, world.pp_size, os.stat(folder).st_mode & 0o777, folder

    pids, *places = zip(*executor.collective_rpc(place), strict=True)
    assert len({*pids, os.getpid()}) == 4
    assert places[:5] == [(0, 1, 2), (0, 1, 2), (3, 3, 3), (1, 1, 1), (0o700,) * 3]
    assert len(set(places[5])) == 1
    executor.shutdown()
    assert not os.path.exists(places[5][0])


def test_some_ranks_alone(make_executor: MakeExecutor) -> None:
    executor = make_executor(3)
    assert [reply["rank"] for reply in executor.collective_rpc("echo", (1,), ranks=[2, 0])] == [2, 0]
    assert executor.collective_rpc("echo", (1,), ranks=[]) == []
    assert executor.collective_rpc("echo", (1,), ranks=[], non_block=True).result(0) == []
    executor.collective_rpc("sleep_then", (1.0, None), ranks=[1], non_block=True)
    assert executor.collective_rpc("echo", (1,), ranks=[0, 2], timeout=PATIENCE)[1]["rank"] == 2, "rank 1 is not asked"
    for wrong in ([3], [-1], [0, 0]):
        with pytest.raises(ValueError, match="has the ranks 0 to 2"):
            executor.collective_rpc("echo", (1,), ranks=wrong)


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_payloads_of_any_size_in_both_directions(rounds: int, make_executor: MakeExecutor) -> None:
    executor = make_executor(2, options={"chunk_bytes": CHUNK, "num_chunks": 3})
    rng = random.Random(0)

    def digest_and_return(worker: Any, data: Any) -> Any:
        return hashlib.sha256(data).hexdigest(), data

    processes = [psutil.Process(pid) for pid in (os.getpid(), *executor.collective_rpc(lambda worker: os.getpid()))]
    before: list[int] = []
    for number in range(rounds):
        for size in (0, 1, CHUNK - 1, CHUNK, 100, CHUNK + 1, 10 * CHUNK, 17, 100 * CHUNK):
            data = rng.randbytes(size)
            for digest, back in executor.collective_rpc(digest_and_return, (data,), timeout=PATIENCE):
                assert digest == hashlib.sha256(data).hexdigest()
                assert back == data
        if number == rounds // 5:
            before = [process.memory_info().rss for process in processes]
    after = [process.memory_info().rss for process in processes]
    assert all(now < then + (8 << 20) for now, then in zip(after, before, strict=True)), "bytes that nobody gave back"
    assert executor.execute_model(plan(1)).step_id == 1


def test_many_large_calls_at_once_do_not_block_one_another(make_executor: MakeExecutor) -> None:
    """Both directions are full at the same time."""
    executor = make_executor(2, options={"chunk_bytes": CHUNK, "num_chunks": 2})
    data = os.urandom(50 * CHUNK)
    futures = [executor.collective_rpc(lambda worker, data: data, (data,), non_block=True) for _ in range(20)]
    for future in futures:
        assert future.result(PATIENCE) == [data, data]


def test_arguments_may_be_local_too(make_executor: MakeExecutor) -> None:
    class Local:
        value = 17

    executor = make_executor(2)
    assert [reply["value"].value for reply in executor.collective_rpc("echo", (Local(),))] == [17, 17]


@pytest.fixture
def by_value() -> Iterator[None]:
    """This test module goes to other processes by value, as a script would."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


class _Exits:
    """Loading it ends the thread that does."""

    def __reduce__(self) -> Any:
        return sys.exit, (3,)


@pytest.mark.usefixtures("by_value")
def test_what_ends_a_thread_fails_its_call_alone(make_executor: MakeExecutor) -> None:
    executor = make_executor(2)
    with pytest.raises(WorkerError, match="SystemExit: 3"):
        executor.collective_rpc(lambda worker: _Exits(), timeout=PATIENCE)
    assert executor.collective_rpc("echo", ("after",), timeout=PATIENCE)[0]["value"] == "after"


def test_replies_that_nobody_can_take_are_the_end(make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(rank: int, *_: Any) -> None:
        raise MemoryError("odd-17")

    executor = make_executor(2)
    monkeypatch.setattr(replies, "take_reply", take)
    with pytest.raises(ExecutorFailed, match=r"replies of worker rank \d cannot be taken: MemoryError: odd-17"):
        executor.collective_rpc("echo", (1,), timeout=PATIENCE)


def test_an_answer_that_comes_with_the_time_out_is_one(make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(executor: Any, call: Any, deadline: Any) -> TimeoutError:
        call.future.result(PATIENCE)  # it comes after the time has run out, and before that is told
        return TimeoutError("too late")

    monkeypatch.setattr(MultiprocExecutor, "_late", late)
    executor = make_executor(1)
    assert executor.collective_rpc("sleep_then", (0.3, 17), timeout=0.1) == [17]


@pytest.mark.parametrize("timeout", [1e12, math.inf])
def test_any_time_out_will_do(timeout: float, make_executor: MakeExecutor) -> None:
    executor = make_executor(1)
    assert executor.collective_rpc("sleep_then", (0, 17), timeout=timeout) == [17]
    assert executor.collective_rpc("sleep_then", (0, 17), timeout=timeout, non_block=True).result(PATIENCE) == [17]


def test_a_queue_that_nobody_empties_is_no_hang(make_executor: MakeExecutor) -> None:
    executor = make_executor(2, options={"chunk_bytes": CHUNK, "num_chunks": 2})
    executor.collective_rpc("sleep_then", (2.0, None), non_block=True)
    with pytest.raises(TimeoutError, match=r"echo: ranks 0, 1 took nothing off the queue within 0\.5 s"):
        executor.collective_rpc("echo", (os.urandom(100 * CHUNK),), timeout=0.5)
    assert executor.collective_rpc("echo", (1,), timeout=PATIENCE)[0]["value"] == 1


def test_a_step_that_overruns_the_time_out_is_the_end(make_executor: MakeExecutor) -> None:
    executor = make_executor(2, step_timeout=0.3)
    causes: list[BaseException] = []
    executor.register_failure_callback(causes.append)
    with pytest.raises(TimeoutError, match="execute_model: no answer from rank 1"):
        executor.execute_model(plan(1, sleep=30.0, rank=1))
    assert "executor.step_timeout" in str(causes[0])
    with pytest.raises(ExecutorFailed, match="no answer from rank 1"):
        executor.check_health()


def test_health_is_a_round_trip_with_a_deadline(make_executor: MakeExecutor) -> None:
    executor = make_executor(2, step_timeout=0.3)
    executor.check_health()
    executor.collective_rpc("sleep_then", (1.0, None), ranks=[0], non_block=True)
    with pytest.raises(ExecutorFailed, match="check_health: no answer from rank 0"):
        executor.check_health()


def test_pipeline_stages_take_several_steps(make_executor: MakeExecutor) -> None:
    executor = make_executor(1, pipeline_parallel_size=2)
    assert executor.max_concurrent_batches == 2
    assert executor.supports_pp
    done: list[int] = []
    futures = [executor.execute_model(plan(i, sleep=0.02, rank=i % 2), non_block=True) for i in range(20)]
    for future in futures:
        future.add_done_callback(lambda f: done.append(f.result().step_id))
    for future in futures:
        future.result(PATIENCE)
    assert done == list(range(20))


def test_an_error_of_a_rank_that_is_not_to_answer_fails_the_step(make_executor: MakeExecutor) -> None:
    executor = make_executor(3)
    wish = {"raise": "boom-17", "rank": 2}
    future = executor.execute_model(plan(1, **wish), non_block=True)
    with pytest.raises(WorkerError, match="boom-17"):
        future.result(PATIENCE)
    assert executor.execute_model(plan(2)).step_id == 2
