"""Parts of the attention kit: what few backends have, blocks that move, and metadata for graphs."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.testing.conformance._attention_base import GEOMETRIES, LIMITS, AttentionKit

EXTRAS: dict[str, dict[str, Any]] = {
    "alibi": {"alibi": True},
    "alibi_window_cap": {"alibi": True, "sliding_window": 11, "logits_soft_cap": 8.0},
    "sinks": {"sinks": True},
    "sinks_window": {"sinks": True, "sliding_window": 7},
    "scaled": {"kv_scales": "tensor"},
    "scaled_by_head": {"kv_scales": "head"},
    "narrower": {"kv_dtype": "bfloat16"},
    "int8": {"kv_dtype": "int8", "kv_scales": "tensor"},
    "int8_by_head": {"kv_dtype": "int8", "kv_scales": "head", "sliding_window": 20},
    "float8": {"kv_dtype": "float8_e4m3fn"},
    "float8_scaled": {"kv_dtype": "float8_e4m3fn", "kv_scales": "tensor", "logits_soft_cap": 5.0},
    "float8_by_head": {"kv_dtype": "float8_e4m3fn", "kv_scales": "head", "sinks": True},
}
"""What few backends have: changes of the query. "narrower" is so for float32; it is as wide as the other two types."""


class OptionalFeatures(AttentionKit):
    """ALiBi, sinks, and caches of another type or with scales."""

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("extras", EXTRAS)
    def test_what_few_backends_have(self, extras: str, dtype: str) -> None:
        session = self.session(self.query("smollm2", dtype, **EXTRAS[extras]), num_blocks=96)
        session.check([("a", 5), ("b", 1), ("c", 18)])
        session.check([("a", 1), ("d", 41), ("c", 13), ("b", 1)])
        session.check([("a", 1), ("b", 1), ("c", 1), ("d", 1)])

    @pytest.mark.parametrize("limits", ["plain", "window"])
    @pytest.mark.parametrize("extras", ["alibi", "sinks", "int8_by_head", "float8_scaled"])
    def test_what_few_backends_have_on_long_rows(self, extras: str, limits: str) -> None:
        changes = {**EXTRAS[extras], "sliding_window": LIMITS[limits][0], "num_heads": 2, "num_kv_heads": 1}
        session = self.session(self.query("no_groups", **changes), num_blocks=128)
        session.check([("long", 300), ("short", 3)])
        session.check([("short", 1), ("long", 40)])
        session.check([("long", 1), ("short", 1)])


class MovedBlocks(AttentionKit):
    """``move_blocks``: forks and swaps."""

    @pytest.mark.parametrize("kv_dtype", ["float32", "int8", "float8_e4m3fn"])
    @pytest.mark.parametrize("geometry", GEOMETRIES)
    def test_blocks_are_copied_within_a_cache(self, geometry: str, kv_dtype: str) -> None:
        query = self.query(geometry, kv_dtype=kv_dtype)
        session = self.session(query, num_blocks=40)
        session.check([("a", 3 * query.block_size + 1), ("b", 2 * query.block_size)])
        blocks = list(session.rows["a"].blocks)
        copies = [session.free.pop() for _ in blocks]
        self.move(session.caches[0], session.caches[0], list(zip(blocks, copies, strict=True)))
        for block in blocks:
            session.caches[0][block] = session.empty_cache(session.caches[0][block].shape)
        session.rows["a"].blocks = copies
        session.check([("a", 1), ("b", 1)])

    def test_every_source_is_read_before_a_target_is_written(self) -> None:
        session = self.session(self.query(), num_blocks=40)
        session.check([("a", 33), ("b", 40), ("c", 20)])
        a, b, spare = session.rows["a"].blocks, session.rows["b"].blocks, session.free.pop()
        # Two rows change places, and a chain: what was in one block is wanted where another one is read from.
        pairs = [*zip(a[:2], b[:2], strict=True), *zip(b[:2], a[:2], strict=True), (a[2], b[2]), (b[2], spare)]
        self.move(session.caches[0], session.caches[0], pairs)
        session.rows["a"].blocks, session.rows["b"].blocks = [*b[:2], b[2]], [*a[:2], spare]
        session.free.append(a[2])
        session.check([("a", 1), ("b", 1), ("c", 1)])

    @pytest.mark.parametrize("geometry", GEOMETRIES)
    def test_blocks_go_to_the_host_and_back(self, geometry: str) -> None:
        import torch

        query = self.query(geometry)
        session = self.session(query, num_blocks=40)
        session.check([("a", 2 * query.block_size + 3), ("b", 5)])
        pinned = torch.device(self.device).type != "cpu"
        shape = self.backend.kv_cache_shape(6, query.block_size, query.num_kv_heads, query.head_size)
        host = torch.zeros(shape, dtype=session.kv_dtype, pin_memory=pinned)
        blocks = session.rows["a"].blocks
        self.move(session.caches[0], host, [(block, 5 - i) for i, block in enumerate(blocks)])
        for block in blocks:
            session.caches[0][block] = session.empty_cache(session.caches[0][block].shape)
        returned = [session.free.pop() for _ in blocks]
        self.move(host, session.caches[0], [(5 - i, block) for i, block in enumerate(returned)])
        session.rows["a"].blocks = returned
        session.check([("a", 1), ("b", 1)])

    def move(self, source: Any, target: Any, pairs: list[tuple[int, int]]) -> None:
        """``move_blocks`` as a worker calls it."""
        import torch

        self.backend.move_blocks(source, target, torch.tensor(pairs, dtype=torch.int64))


class Graphs(AttentionKit):
    """Metadata in buffers that stay."""

    @pytest.mark.parametrize("limits", LIMITS)
    def test_metadata_that_stays_is_refilled(self, limits: str) -> None:
        """What a captured graph does on every replay: the same metadata and as many tokens as ever, of which some are padding."""
        import torch

        query = self.query("no_groups", limits=limits)
        if self.backend.graph_support == "never":
            pytest.skip(f"{self.backend.name} cannot be captured in graphs")
        session = self.session(query, num_blocks=96)
        session.check([("a", 70), ("b", 3), ("c", 16)])
        metadata = session.backend.graph_metadata(5, 24)
        before = session.caches[0].clone()
        session.replay(metadata, None, 5)
        assert torch.equal(session.caches[0].nan_to_num(), before.nan_to_num()), "padding stores nothing"
        for names in (["a", "b", "c"], ["c"], ["b", "a"], ["d", "a", "c", "b", "e"], ["c", "d"]):
            step = session.prepare([(name, 1) for name in names])
            session.backend.refill(metadata, step.common)
            session.compare(session.replay(metadata, step, 5)[: len(names)], step.expected)

    def test_graph_metadata_needs_graph_support(self) -> None:
        session = self.session(self.query())
        if self.backend.graph_support == "never":
            with pytest.raises(TypeError, match="graph_support is 'never'"):
                session.backend.graph_metadata(4, 4)
        else:
            assert session.backend.graph_metadata(4, 4) is not None
