"""Starts and stops leave nothing behind: no process, descriptor, thread, or shared memory."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from pegboard import LLM, SamplingParams
from pegboard.testing.ranked_model import RankedPlugin


@pytest.mark.parametrize("times", [pytest.param(50, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.long)])
def test_starts_and_stops_of_an_engine_leave_nothing(times: int, request: pytest.FixtureRequest) -> None:
    if times > 50 and "long" not in (request.config.option.markexpr or ""):
        pytest.skip("takes a quarter of an hour; run it with -m long")
    once()
    gc.collect()
    before = held()
    for _ in range(times):
        once()
    gc.collect()
    assert held() == before


def once() -> None:
    executor = {"name": "mp", "worker": "pegboard.testing.fakes:RunnerWorker", "tensor_parallel_size": 2}
    plugins: Any = {"ranked": RankedPlugin(), "executor_mp": {"preload": [], "chunk_bytes": "16K"}}
    with LLM("scripted", plugins=plugins, executor=executor, max_model_len=64, kv_cache={"num_blocks": 16}) as llm:
        assert len(llm.generate("prompt", SamplingParams(max_tokens=3, temperature=0))[0].outputs[0].token_ids) == 3


def held() -> dict[str, Any]:
    me = psutil.Process()
    prefixes = (f"pegboard-mp-{me.pid}-", f"pegboard-mq-{me.pid}-")
    memory: Callable[[str], bool] = lambda name: name.startswith(prefixes)  # noqa: E731
    return {
        "descriptors": sorted(
            os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in os.listdir("/proc/self/fd") if _open(fd)
        ),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "processes": sorted(child.pid for child in me.children(recursive=True)),
        "shared memory": sorted(filter(memory, os.listdir("/dev/shm"))),
        "mappings": sum("pegboard-m" in line for line in open("/proc/self/maps")),  # noqa: SIM115
    }


def _open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")
