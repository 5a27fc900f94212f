"""Ranks on several (virtual) nodes: the same tokens, messages of any size, and the loss of a node."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from pegboard import LLM, SamplingParams
from pegboard.contracts.executor import ExecutorFailed, WorkerError
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.conformance.executor import PATIENCE, plan

pytestmark = pytest.mark.slow
SPREAD = {"strategy": "STRICT_SPREAD"}
STORE = 100 << 20


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_answers_equal_those_of_uniproc(tp: int, pp: int, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, max_position_embeddings=512)
    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(4, 1000) for _ in range(length)]} for length in (5, 200, 40)]
    params = [SamplingParams(temperature=0.8, seed=n, max_tokens=20, ignore_eos=True, n=n) for n in (1, 2, 1)]

    def spoken(name: str, tp: int = 1, pp: int = 1, **options: Any) -> list[list[int]]:
        ranks = {"num_threads": 1, "tensor_parallel_size": tp, "pipeline_parallel_size": pp}
        settings = {"name": name, "communicator": "torch_distributed", **ranks}
        llm = LLM(
            str(folder), dtype="float32", executor=settings, kv_cache={"num_blocks": 100}, plugins={"executor_ray": options}
        )
        try:
            if name == "ray":
                assert len(set(llm.collective_rpc(lambda worker: ray.get_runtime_context().get_node_id()))) == 2
            return [list(answer.token_ids) for output in llm.generate(prompts, params) for answer in output.outputs]
        finally:
            llm.shutdown()

    assert spoken("ray", tp, pp, **SPREAD) == spoken("uniproc")


@pytest.mark.parametrize("ranks", [{"ranks": 2}, {"ranks": 1, "pipeline_parallel_size": 2}])
def test_many_messages_of_any_size(ranks: dict[str, int], make_executor: Callable[..., Any]) -> None:
    executor = make_executor(**ranks, options={**SPREAD, "buffer_bytes": 64 << 10})
    sizes = [0, 50_000, 1_000_000, 10, 200_000, 1, 60_000, 64_000] * 3
    data = [os.urandom(size) for size in sizes]
    futures = [executor.collective_rpc("echo", (each,), non_block=True) for each in data]
    for each, future in zip(data, futures, strict=True):
        assert [reply["value"] for reply in future.result(PATIENCE)] == [each, each]
    for rank in (0, 1):
        assert executor.collective_rpc("echo", (1,), ranks=[rank], timeout=PATIENCE)[0]["rank"] == rank
    futures = [executor.execute_model(plan(i, sleep=0.001, rank=i % 2), non_block=True) for i in range(50)]
    assert [future.result(PATIENCE).step_id for future in futures] == list(range(50))


def test_errors_and_hangs_leave_the_nodes_alone(make_executor: Callable[..., Any]) -> None:
    """A raylet that has to wait for a reader is deaf, and ends when the reader's channel is closed."""
    executor = make_executor(2, step_timeout=0.5, options=SPREAD)

    def one_raises(worker: Any, rank: int) -> None:
        if worker.world.rank == rank:
            raise RuntimeError(f"odd-{rank}")
        time.sleep(0.2)

    failing = [executor.collective_rpc(one_raises, (number % 2,), non_block=True) for number in range(6)]
    for number, future in enumerate(failing):
        with pytest.raises(WorkerError, match=f"odd-{number % 2}"):
            future.result(PATIENCE)
    assert executor.execute_model(plan(1)).step_id == 1
    steps = [executor.execute_model(plan(number, sleep=600.0, rank=1), non_block=True) for number in range(4)]
    with pytest.raises(ExecutorFailed, match="check_health: no answer from rank 1"):
        executor.check_health()
    executor.shutdown()
    for step in steps:
        with pytest.raises(ExecutorFailed):
            step.result(PATIENCE)
    time.sleep(0.5)
    assert [node["Alive"] for node in ray.nodes()] == [True, True]


def test_a_node_is_lost(two_nodes: Any, make_executor: Callable[..., Any]) -> None:
    cluster = two_nodes._cluster
    node = cluster.add_node(num_cpus=2, object_store_memory=STORE, resources={"extra": 2}, include_dashboard=False)
    cluster.wait_for_nodes()
    executor = make_executor(2, options={"resources": {"extra": 1}})
    causes: list[BaseException] = []
    executor.register_failure_callback(causes.append)
    step = executor.execute_model(plan(1, sleep=600.0), non_block=True)
    cluster.remove_node(node, allow_graceful=False)
    with pytest.raises(ExecutorFailed, match="worker rank"):
        step.result(PATIENCE)
    end = time.monotonic() + PATIENCE
    while not causes:
        assert time.monotonic() < end
        time.sleep(0.01)
    with pytest.raises(ExecutorFailed, match="worker rank"):
        executor.check_health()
    executor.shutdown()
    assert len(causes) == 1
