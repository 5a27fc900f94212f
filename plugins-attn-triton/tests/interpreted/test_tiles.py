"""The kernels on tiles so small, and in splits so many, that every loop runs several times."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pegboard.contracts.attention import AttentionBackend, AttentionQuery, CommonAttentionMetadata
from pegboard.plugins.attention_pair import pair
from pegboard.testing.attention_session import AttentionSession
from pegboard_attn_triton import blocks
from pegboard_attn_triton.backend import TritonAttentionBackend
from pegboard_attn_triton.tuning.config import KernelConfig
from pegboard_attn_triton.tuning.search import Bench, Load, tune

QUERY = AttentionQuery("cpu", "float32", "float32", 2, 1, 32, 8)


def small(query: AttentionQuery) -> TritonAttentionBackend:
    backend = TritonAttentionBackend(query)
    backend.decode_config, backend.prefill_config = KernelConfig(0, 16, 1, 1), KernelConfig(16, 16, 1, 1)
    backend.processors = 400
    return backend


INT8 = {"kv_dtype": "int8", "kv_scales": "head"}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 21},
    "window_smaller_than_a_tile": {"sliding_window": 3},
    "soft_cap": {"logits_soft_cap": 3.0},
    "everything": {
        "sliding_window": 40,
        "logits_soft_cap": 6.0,
        "alibi": True,
        "sinks": True,
        "kv_dtype": "int8",
        "kv_scales": "head",
    },
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "odd_group": {"num_heads": 3, "head_size": 24},
    "two_kv_heads": {"num_heads": 4, "num_kv_heads": 2, "block_size": 16},
    "bfloat16": {"dtype": "bfloat16", "kv_dtype": "bfloat16", "sliding_window": 21},
    "bfloat16_float8": {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn", "kv_scales": "tensor"},
    "float16_int8": {"dtype": "float16", "kv_dtype": "int8", "kv_scales": "tensor", "sinks": True},
    "odd_blocks": {"block_size": 12},
}


@pytest.mark.parametrize("case", CASES)
def test_long_rows_in_small_tiles(case: str) -> None:
    session = AttentionSession(small, dataclasses.replace(QUERY, **CASES[case]))
    session.check([("a", 111), ("b", 1)])
    session.check([("b", 1), ("a", 19), ("c", 2)])
    step = session.prepare([("a", 1), ("b", 1), ("c", 1)])
    metadata = session.backend.build_metadata(step.common)
    windowed = (session.query.sliding_window or 99) < 64
    assert (metadata.num_splits > 1) != windowed, "a long row is read in splits, a short window is not"
    session.compare(session.run(step, metadata=metadata), step.expected)


def test_a_group_that_is_larger_than_a_tile() -> None:
    session = AttentionSession(small, dataclasses.replace(QUERY, num_heads=20, head_size=16))
    session.check([("a", 9), ("b", 1)])
    session.check([("b", 4), ("a", 1)])


@pytest.mark.parametrize("splits", [1, 2, 8, 32])
@pytest.mark.parametrize("case", ["sinks", "window", "everything"])
def test_any_number_of_splits(case: str, splits: int) -> None:
    """Short rows leave the last splits empty."""
    session = AttentionSession(small, dataclasses.replace(QUERY, **CASES[case]))
    session.check([("a", 90), ("b", 17), ("c", 1)])
    step = session.prepare([("b", 1), ("a", 1), ("d", 1)])
    metadata = session.backend.build_metadata(step.common)
    metadata.num_splits = splits
    session.compare(session.run(step, metadata=metadata), step.expected)


def test_a_layer_whose_heads_are_shared_otherwise_is_refused() -> None:
    session = AttentionSession(small, QUERY)
    step = session.prepare([("a", 3)])
    session.layer = dataclasses.replace(session.layer, num_heads=4)
    with pytest.raises(ValueError, match="4 heads on 1 key heads, and this backend was made for 2 on 1"):
        session.run(step)


def test_graphs_read_in_as_many_splits_as_the_longest_row_may_need() -> None:
    session = AttentionSession(small, QUERY)
    session.check([("a", 60), ("b", 5)])
    metadata = session.backend.graph_metadata(4, 40)
    assert metadata.num_splits > 1
    for names in (["a", "b"], ["b"], ["b", "c", "a"]):
        step = session.prepare([(name, 1) for name in names])
        session.backend.refill(metadata, step.common)
        session.compare(session.replay(metadata, step, 4)[: len(names)], step.expected)


def test_blocks_before_the_window_may_be_somebody_else_s() -> None:
    """As soon as a window has passed, its blocks are released: what is in them and in the table is not the row's."""
    session = AttentionSession(small, dataclasses.replace(QUERY, sliding_window=20))
    session.check([("a", 64)])
    for token in range(2):
        step = session.prepare([("a", 1 + 5 * token)])
        first = 64 + token - 20 + 1
        for column in range(first // QUERY.block_size):
            block = int(step.common.block_table[0, column])
            session.caches[0][block] = float("nan")
        session.compare(session.run(step), step.expected)


def test_a_pair_shares_the_cache() -> None:
    """Each of the two sees its own rows only; both have stored before one reads."""
    seen: list[set[int]] = []

    class Decode(TritonAttentionBackend):
        name = "triton_decode"

        def build_metadata(self, common: CommonAttentionMetadata) -> Any:
            seen.append(set((common.query_start_loc[1:] - common.query_start_loc[:-1]).tolist()))
            return super().build_metadata(common)

    def make(backend: type[AttentionBackend], offered: dict[str, Any]) -> AttentionBackend:
        return backend(**offered)

    session = AttentionSession(pair(TritonAttentionBackend, Decode, make), QUERY)
    session.check([("a", 30), ("b", 1)])
    session.check([("a", 1), ("c", 24), ("b", 1), ("d", 2)], forks={"d": ("c", 16)})
    session.check([("c", 1), ("d", 1), ("b", 0), ("a", 1)])
    assert seen == [{1}, {1}, {1}]


def test_one_kernel_moves_blocks() -> None:
    source, target = torch.randn(6, 2, 1, 8, 24), torch.zeros(9, 2, 1, 8, 24)
    assert blocks.move(source, target, torch.tensor([[5, 0], [2, 8]]))
    assert torch.equal(target[[0, 8]], source[[5, 2]])
    assert int((target != 0).flatten(1).any(1).sum()) == 2


def test_what_one_kernel_cannot_move_is_left_to_the_caller() -> None:
    cache = torch.randn(6, 2, 1, 8, 24)
    before = cache.clone()
    assert not blocks.move(cache, cache, torch.tensor([[1, 2], [2, 3]])), "a target is a source"
    assert not blocks.move(cache.transpose(1, 3), cache, torch.tensor([[1, 2]])), "there are gaps"
    assert torch.equal(cache, before)


@pytest.mark.parametrize(("kernel", "block_m"), [("decode", 0), ("prefill", 16)])
def test_a_search_runs_the_kernel(kernel: str, block_m: int) -> None:
    from pegboard_attn_triton.tuning.config import Problem

    bench = Bench(Problem(kernel, 16, 2, "float32", "float32", 8), 1, Load(2, 40, 4), torch.device("cpu"))
    configs = [KernelConfig(block_m, 16, 1, 1), KernelConfig(block_m, 32, 1, 1)]
    assert tune(bench._problem, configs, bench) in configs
    assert bench.out.isfinite().all()
    assert bench.out.abs().max() > 0
