"""Calls over the queue beside what the contract says, to ranks on this process's node and on another one."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pegboard.contracts.executor import ExecutorFailed
from pegboard.testing.conformance.executor import PATIENCE, plan
from pegboard.testing.rpc_worker import RpcWorker
from pegboard.wire import World
from pegboard_executor_mp.answering import Answering
from pegboard_executor_mp.messages import Reply, Request
from pegboard_executor_mp.packing import pack, unpack
from pegboard_executor_mp.queue import MessageQueue, attach
from pegboard_executor_mp.queue.reader import LocalReader
from pegboard_executor_mp.queue.remote_reader import RemoteReader
from pegboard_executor_ray import queue_rank
from pegboard_executor_ray.queue_executor import RayQueueExecutor
from pegboard_executor_ray.queue_rank import QueueRank

MakeExecutor = Callable[..., RayQueueExecutor]
PluginWith = Callable[[type], dict[str, object]]

CHUNK = 16 << 10
SMALL = {"chunk_bytes": CHUNK, "num_chunks": 4}
NEAR: dict[str, Any] = {**SMALL, "resources": {"near": 1}}
FAR: dict[str, Any] = {**SMALL, "strategy": "STRICT_SPREAD"}
"""Small queues. FAR: the second rank is on the other node."""


@pytest.fixture(scope="module", params=[NEAR, FAR], ids=["near", "far"])
def two(request: pytest.FixtureRequest, nodes: Any, open_executor: MakeExecutor) -> Iterator[RayQueueExecutor]:
    """Shared by the tests that break nothing."""
    nodes.start()
    executor = open_executor(2, options=request.param)
    yield executor
    executor.shutdown()


def test_memory_is_shared_on_this_node_and_tcp_leads_to_others(two: RayQueueExecutor) -> None:
    fleet = two._fleet
    assert fleet._crew is not None
    nodes = [place.node_id for place in fleet._crew.places]
    here = fleet._crew.driver.node_id
    far = nodes != [here, here]
    assert nodes[0] == here
    assert [type(reader) for reader in fleet._readers] == [LocalReader, RemoteReader if far else LocalReader]
    handles = [fleet.requests.handle(reader) for reader in range(2)]  # type: ignore[attr-defined]
    assert [(handle.segment is None, handle.address is None) for handle in handles] == [(False, True), (far, not far)]


def test_every_rank_has_its_own_process_and_its_place(two: RayQueueExecutor) -> None:
    worlds = two.collective_rpc(lambda worker: worker.world)
    assert len({os.getpid(), *two.collective_rpc(lambda worker: os.getpid())}) == 3
    assert [(world.rank, world.tp_size, world.pp_size) for world in worlds] == [(0, 2, 1), (1, 2, 1)]
    assert {world.local_size for world in worlds} in ({1}, {2})


@pytest.mark.parametrize("size", [0, 1, CHUNK - 500, CHUNK, CHUNK + 1, 4 * CHUNK, 1 << 20, 24 << 20])
def test_payloads_of_any_size_in_both_directions(two: RayQueueExecutor, size: int) -> None:
    data = os.urandom(size)
    for reply in two.collective_rpc("echo", (data,), timeout=PATIENCE):
        assert reply["value"] == data
    assert two.collective_rpc(lambda worker, n: bytes(n), (size,), timeout=PATIENCE) == [bytes(size)] * 2


def test_many_large_calls_and_steps_at_once(two: RayQueueExecutor) -> None:
    data = [os.urandom(size) for size in (CHUNK, 10, 20 * CHUNK, 0)] * 5
    futures = [two.collective_rpc("echo", (each,), non_block=True) for each in data]
    rows = [1, CHUNK, 2, 3 * CHUNK, 3]
    steps = [two.execute_model(plan(i, rows=n), non_block=True) for i, n in enumerate(rows)]
    for each, future in zip(data, futures, strict=True):
        assert [reply["value"] for reply in future.result(PATIENCE)] == [each, each]
    for n, step in zip(rows, steps, strict=True):
        assert step.result(PATIENCE).sampled_token_ids == [[RpcWorker.TOKEN]] * n


def test_some_ranks_alone(two: RayQueueExecutor) -> None:
    assert [reply["rank"] for reply in two.collective_rpc("echo", (1,), ranks=[1])] == [1]
    assert two.collective_rpc("echo", (1,), ranks=[]) == []
    with pytest.raises(ValueError, match="has the ranks 0 to 1"):
        two.collective_rpc("echo", (1,), ranks=[2])


@pytest.mark.parametrize("far", [False, True])
def test_a_reply_is_not_lost_while_its_reader_is_on_its_way(far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes after it, which would take it along."""
    monkeypatch.setattr(queue_rank.Place, "here", lambda rank: SimpleNamespace(node_ip="127.0.0.1"))
    rank = QueueRank(0)
    rank._answering = Answering(0, RpcWorker(None, None, World()))
    requests = MessageQueue.create(int(not far), remote_readers=int(far), host="127.0.0.1")
    handle, error = rank.open_queues(requests.handle(0), CHUNK, 4)
    assert error is None
    serving = threading.Thread(target=rank.serve)
    serving.start()
    requests.wait_ready(PATIENCE)
    requests.put(tuple(Request(1, pack(lambda worker: 17), pack(((), {})), None, None)))
    time.sleep(0.2)
    replies = attach(handle)
    try:
        assert unpack(Reply(*replies.get(PATIENCE)).content) == 17
    finally:
        rank.leave()
        serving.join(PATIENCE)
        replies.close()
        requests.close()
    assert not serving.is_alive()


class Notes(RpcWorker):
    """Writes down what it does, and in which thread."""

    def __init__(self, config: Any, composition: Any, world: Any) -> None:
        super().__init__(config, composition, world)
        self.done: list[Any] = []
        self.threads = {threading.get_ident()}

    def execute_model(self, plan: Any) -> Any:
        self.done.append(plan.step_id)
        self.threads.add(threading.get_ident())
        return super().execute_model(plan)


@pytest.mark.slow
@pytest.mark.parametrize("options", [NEAR, FAR], ids=["near", "far"])
def test_stages(options: dict[str, Any], make_executor: MakeExecutor, plugin_with: PluginWith, tmp_path: Path) -> None:
    """They are under way at once, each is in one thread, calls and steps run in the order made, the last stage's results come."""
    executor = make_executor(1, pipeline_parallel_size=2, worker="own", plugins=plugin_with(Notes), options=options)
    assert executor.max_concurrent_batches == 2
    first, second, again = (str(tmp_path / name) for name in ("first", "second", "again"))
    steps = [plan(0), plan(1)]
    steps[0].ext = {"rpc": {"meet": {0: (first, second), 1: (second, again)}}}
    steps[1].ext = {"rpc": {"meet": {0: (again, None)}}}
    ahead = [executor.execute_model(step, non_block=True) for step in steps]
    assert [future.result(PATIENCE).step_id for future in ahead] == [0, 1]

    def note(worker: Any, what: int) -> None:
        worker.done.append(what)
        worker.threads.add(threading.get_ident())

    rng = random.Random(0)
    futures = [
        executor.execute_model(plan(number, sleep=0.002, rank=number % 2), non_block=True)
        if rng.random() < 0.5
        else executor.collective_rpc(note, (number,), non_block=True)
        for number in range(2, 60)
    ]
    for future in futures:
        future.result(PATIENCE)
    for done, threads in executor.collective_rpc(lambda worker: (worker.done, len(worker.threads))):
        assert done == list(range(60))
        assert threads == 1


def test_a_step_that_overruns_the_time_out_is_the_end(make_executor: MakeExecutor, caplog: pytest.LogCaptureFixture) -> None:
    executor = make_executor(2, step_timeout=0.3, options=NEAR)
    causes: list[BaseException] = []
    executor.register_failure_callback(causes.append)
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


def test_health_is_a_round_trip_with_a_deadline(make_executor: MakeExecutor) -> None:
    executor = make_executor(2, step_timeout=0.5, options=NEAR)
    executor.check_health()
    executor.collective_rpc("sleep_then", (2.0, None), ranks=[0], non_block=True)
    with pytest.raises(ExecutorFailed, match="check_health: no answer from rank 0"):
        executor.check_health()
