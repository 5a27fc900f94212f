"""Every kernel, with every entry of the shipped table, compiled for its device without one: it fits, and uses tensor cores."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from pegboard_attn_triton import ahead, launch
from pegboard_attn_triton.device import interpreting
from pegboard_attn_triton.tuning.config import Problem, shared_bytes
from pegboard_attn_triton.tuning.table import SHARED_MEMORY, TABLE, lookup

pytestmark = [pytest.mark.slow, pytest.mark.skipif(interpreting(), reason="nothing is compiled where everything is interpreted")]

TYPES = {
    (80, 1): [("float16", "int8")],
    (90, 1): [("bfloat16", "float8_e4m3fn"), ("float16", "int8")],
    (80, 2): [("bfloat16", "bfloat16"), ("float16", "float16")],
    (90, 2): [("bfloat16", "bfloat16"), ("float16", "float16")],
    (80, 4): [("float32", "float32")],
    (90, 4): [("float32", "float32")],
}
"""dtype and cache dtype, by generation and bytes of a cached item."""
SLOPES = ahead.empty(16, dtype=torch.float32)
FEATURES: list[dict[str, Any]] = [
    {},
    {"sliding_window": 128},
    {"logits_soft_cap": 30.0, "key_scale": 0.5, "value_scale": 0.5},
    {"alibi_slopes": SLOPES, "sinks": SLOPES},
    {"key_scale": SLOPES, "value_scale": SLOPES, "sliding_window": 64, "sinks": SLOPES},
]
GROUPS, BLOCKS = (4, 3, 1, 8), (16, 32, 64, 8)
ENTRIES = [(index, *key) for index, key in enumerate(TABLE)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", os.environ.get("TRITON_CACHE_DIR") or str(tmp_path_factory.getbasetemp() / "triton"))


def check(compiled: Any, limit: int, *, products: bool) -> None:
    """``products``: by tensor cores."""
    ptx = compiled.asm["ptx"]
    assert ".visible .entry" in ptx
    assert len(compiled.asm["cubin"]) > 0
    assert compiled.metadata.shared <= limit
    assert ("mma.sync" in ptx or "wgmma.mma_async" in ptx) == products


@pytest.mark.parametrize(("index", "generation", "kernel", "head_size", "item"), ENTRIES)
def test_table(index: int, generation: int, kernel: str, head_size: int, item: int) -> None:
    """One type, group size, block size and set of features per entry, in turn: together they meet often enough."""
    types = TYPES[generation, item]
    dtype, kv_dtype = types[index % len(types)]
    problem = Problem(kernel, head_size, GROUPS[index % 4], dtype, kv_dtype, BLOCKS[index // 4 % 4])
    capability = divmod(generation, 10)
    config = lookup(problem, capability)
    assert config == TABLE[generation, kernel, head_size, item], "an entry fits its own device as it is"
    step = ahead.MetaStep(problem, **FEATURES[index % len(FEATURES)])
    attention, *reduction = step.attention(config)
    limit = min(SHARED_MEMORY[capability], shared_bytes(problem, config))
    check(ahead.compile_launch(attention, capability), limit, products=dtype != "float32")
    for each in reduction:
        check(ahead.compile_launch(each, capability), SHARED_MEMORY[capability], products=False)


@pytest.mark.parametrize("generation", [80, 90])
def test_short_tiles_and_odd_sizes(generation: int) -> None:
    """Tiles that a few tokens fill, a head size that is no power of two, and a context in one part."""
    capability = divmod(generation, 10)
    problem = Problem("prefill", 80, 3, "bfloat16", "bfloat16", 16)
    config = lookup(problem, capability)
    step = ahead.MetaStep(problem)
    step.metadata.block_m = 16
    prefill = launch.prefill(step.layer, step.query, step.cache, step.metadata, step.out, config, upcast=False)
    check(ahead.compile_launch(prefill, capability), SHARED_MEMORY[capability], products=True)
    single = ahead.MetaStep(Problem("decode", 96, 3, "float16", "float16", 16), splits=1, sinks=SLOPES)
    [decode] = single.attention(lookup(single.problem, capability))
    check(ahead.compile_launch(decode, capability), SHARED_MEMORY[capability], products=True)


@pytest.mark.parametrize("generation", [80, 90])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", "bfloat16"), ("float32", "int8"), ("float16", "float8_e4m3fn")])
def test_store_and_copies(generation: int, dtype: str, kv_dtype: str) -> None:
    capability = divmod(generation, 10)
    scales = {"key_scale": SLOPES, "value_scale": 0.5} if kv_dtype != dtype else {}
    step = ahead.MetaStep(Problem("decode", 64, 3, dtype, kv_dtype, 16), **scales)
    check(ahead.compile_launch(step.store(), capability), SHARED_MEMORY[capability], products=False)
    copies = launch.copy_blocks(step.cache, step.cache, ahead.empty(3, 2, dtype=torch.int64))
    check(ahead.compile_launch(copies, capability), SHARED_MEMORY[capability], products=False)
