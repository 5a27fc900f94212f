"""The default scheduler in the real engine loop, on a fake executor with several steps in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pegboard.config import EngineConfig, KVCacheSettings, SchedulerConfig
from pegboard.contracts.executor import ExecutorFailed
from pegboard.engine.core import EngineCore
from pegboard.engine.errors import EngineDeadError
from pegboard.testing.driver import expected_output, make_group, make_request
from pegboard.testing.fake_composition import FakeComposition, fake_spec
from pegboard.testing.fakes import FakeExecutor, hash_model
from pegboard_plugins.scheduling.scheduler import DefaultScheduler

VOCAB = 50


def boot(make_scheduler: Callable[..., DefaultScheduler], depth: int) -> EngineCore:
    config = EngineConfig(
        model="none",
        scheduler=SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=6),
        kv_cache=KVCacheSettings(num_blocks=20, block_size=4),
    )

    class Executor(FakeExecutor):
        concurrent_batches = depth

    def scheduler(config: Any, composition: Any, kv_config: Any) -> DefaultScheduler:
        return make_scheduler(config, kv_config)

    scheduler.capabilities = frozenset({"windows"})  # type: ignore[attr-defined]
    parts = {"executor": Executor, "scheduler": scheduler}
    return EngineCore(config, FakeComposition(config, parts, fake_spec(256, VOCAB)))  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_requests_run_to_their_end(make_scheduler: Callable[..., DefaultScheduler], depth: int) -> None:
    core = boot(make_scheduler, depth)
    requests = [make_request(f"r{i}", range(i, i + 10), 25, stop_token_ids=[3]) for i in range(10)]
    requests += make_group("g", range(30), 8, 20)
    for request in requests:
        core.add_request(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ended = []
    for _ in range(500):
        for output in core.step():
            tokens[output.request_id] += output.new_token_ids
            ended += [(output.request_id, output.finish_reason)] if output.finish_reason else []
        if not core.has_requests():
            break
    assert dict(ended) == {r.request_id: expected_output(r, hash_model(VOCAB))[1] for r in requests}
    assert len(ended) == len(requests)
    assert tokens == {r.request_id: expected_output(r, hash_model(VOCAB))[0] for r in requests}
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
    assert core.executor.worker.runner.mirror.rows == {}  # type: ignore[attr-defined]
    assert core.executor.worker.calls == [  # type: ignore[attr-defined]
        "init_device", "load_model", "determine_available_memory", "initialize_cache", "compile_or_warm_up",
    ]  # fmt: skip
    core.shutdown()


def test_an_executor_that_fails_ends_the_engine(make_scheduler: Callable[..., DefaultScheduler]) -> None:
    core = boot(make_scheduler, 2)
    core.add_request(make_request("r", [1, 2], 50))
    core.step()
    executor = core.executor
    assert isinstance(executor, FakeExecutor)
    executor.fail(MemoryError("the worker is gone"))
    with pytest.raises(ExecutorFailed, match="the worker is gone"):
        executor.check_health()
    told: list[BaseException] = []
    executor.register_failure_callback(told.append)
    assert [type(error) for error in told] == [MemoryError]
    with pytest.raises(EngineDeadError, match="the worker is gone"):
        core.step()
