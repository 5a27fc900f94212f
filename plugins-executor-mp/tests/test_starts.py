"""Starts and stops leave nothing behind: no process, descriptor, thread, or shared memory."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from pegboard import LLM, SamplingParams
from pegboard.testing.ranked_model import RankedPlugin


@pytest.mark.parametrize(
    "times", [pytest.param(50, marks=pytest.mark.slow), pytest.param(2000, marks=[pytest.mark.long, pytest.mark.timeout(7200)])]
)
def test_starts_and_stops_of_an_engine_leave_nothing(times: int) -> None:
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
    own = (f"pegboard-mp-{me.pid}-", f"pegboard-mq-{me.pid}-")
    return {
        "descriptors": sorted(
            os.readlink(path).partition(":")[0] for path in Path("/proc/self/fd").iterdir() if path.is_symlink()
        ),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "processes": sorted(child.pid for child in me.children(recursive=True)),
        "shared memory": sorted(name for name in os.listdir("/dev/shm") if name.startswith(own)),
        "mappings": Path("/proc/self/maps").read_text().count("pegboard-m"),
    }
