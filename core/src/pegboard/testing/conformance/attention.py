"""What every attention backend must keep: the values of plain attention, and nothing touched but what it was told to touch.

Subclass ``AttentionBackendConformance`` and give ``backend`` (and ``make``, if its constructor differs); set ``device`` for
another device, ``dtypes`` for fewer types. Whatever ``supports`` accepts must work; what it refuses is skipped.
Tolerances: ``pegboard.testing.attention_session.TOLERANCE``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from pegboard.contracts.attention import AttentionQuery
from pegboard.testing.conformance._attention_base import GEOMETRIES, LIMITS
from pegboard.testing.conformance._attention_features import Graphs, MovedBlocks, OptionalFeatures


class AttentionBackendConformance(OptionalFeatures, MovedBlocks, Graphs):
    """The contract of ``pegboard.contracts.attention``, as tests."""

    # Values

    @pytest.mark.parametrize("limits", LIMITS)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("geometry", GEOMETRIES)
    def test_mixed_steps_equal_plain_attention(self, geometry: str, dtype: str, limits: str) -> None:
        """Prompts, chunks of prompts over a cached prefix, and decode rows, together."""
        session = self.session(self.query(geometry, dtype, limits))
        session.check([("a", 5), ("b", 1), ("c", 18)])
        session.check([("a", 1), ("d", 7), ("c", 13), ("b", 1)])
        session.check([("a", 1), ("b", 1), ("c", 1), ("d", 1)])

    @pytest.mark.parametrize("limits", LIMITS)
    @pytest.mark.parametrize("block_size", [8, 16, 32, 64])
    def test_lengths_around_block_ends(self, block_size: int, limits: str) -> None:
        session = self.session(self.query("no_groups", limits=limits, block_size=block_size), num_blocks=80)
        ends = [block_size - 1, block_size, block_size + 1, 2 * block_size - 1, 2 * block_size]
        session.check([(f"r{n}", n) for n in ends])
        for _ in range(3):
            session.check([(f"r{n}", 1) for n in reversed(ends)])

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("limits", ["plain", "window"])
    def test_long_prompt_in_chunks(self, dtype: str, limits: str) -> None:
        query = self.query("no_groups", dtype, limits, num_heads=2, num_kv_heads=1)
        session = self.session(query, num_blocks=128)
        for count in (150, 1, 301, 64, 200, 1):
            session.check([("long", count)])

    @pytest.mark.parametrize("limits", ["plain", "window"])
    def test_decode_of_many_rows_with_very_different_lengths(self, limits: str) -> None:
        query = self.query("no_groups", "float32", limits, num_heads=2, num_kv_heads=1)
        session = self.session(query, num_blocks=512)
        lengths = [3, 400, 17, 1, 250, 64, 8, 129, 300, 31, 90, 5, 7, 410, 55, 2]
        session.check([(f"r{i}", n) for i, n in enumerate(lengths)])
        names = [f"r{i}" for i in range(len(lengths))]
        for _ in range(2):
            session.check([(name, 1) for name in names])
        session.check([(name, 1) for name in reversed(names)])

    def test_prompts_of_nearly_equal_length(self) -> None:
        session = self.session(self.query(), num_blocks=128)
        lengths = (14, 16, 13, 15, 3, 4, 16, 33, 40)
        session.check([(f"r{i}", n) for i, n in enumerate(lengths)])
        session.check([(f"r{i}", n % 5 + 2) for i, n in enumerate(lengths)])

    @pytest.mark.parametrize("limits", LIMITS)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_rows_that_share_a_long_prefix(self, dtype: str, limits: str) -> None:
        session = self.session(self.query("smollm2", dtype, limits, num_heads=6), num_blocks=128)
        session.check([("p0", 260), ("q0", 100)])
        for i in range(1, 9):
            session.fork("p0", f"p{i}", 256)
        session.fork("p0", "less", 240)
        for i in range(1, 4):
            session.fork("q0", f"q{i}", 96)
        session.check([(f"p{i}", 2 + i % 3) for i in range(1, 9)] + [("q1", 1), ("q2", 1), ("alone", 3), ("less", 3), ("q3", 17)])
        every = [*(f"p{i}" for i in range(9)), "q0", "q1", "alone", "q2", "less", "q3"]
        for _ in range(2):
            session.check([(name, 1) for name in every])

    @pytest.mark.parametrize("limits", ["plain", "window"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("block_size", [8, 16, 32, 64])
    def test_rows_that_share_prefix_blocks(self, dtype: str, limits: str, block_size: int) -> None:
        session = self.session(self.query("no_groups", dtype, limits, block_size=block_size), num_blocks=96)
        session.check([("p0", 69), ("other", 20)])
        for i in range(1, 5):
            session.fork("p0", f"p{i}", 64)
        session.fork("p0", "short", 64 if block_size == 64 else 32)
        session.check([("p1", 3), ("p2", 9), ("other", 1), ("p3", 9), ("p4", 1), ("short", 2)])
        for _ in range(2):
            session.check([("p0", 1), ("p1", 1), ("p2", 1), ("other", 1), ("p3", 1), ("p4", 1), ("short", 1)])

    @pytest.mark.parametrize("limits", LIMITS)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_rows_that_read_what_the_same_step_writes(self, dtype: str, limits: str) -> None:
        """Requests that arrive together share the prefix that one of them computes."""
        session = self.session(self.query("smollm2", dtype, limits, num_heads=6), num_blocks=96)
        session.check([("old", 30)])
        shared = {"b": ("a", 96), "c": ("a", 96), "d": ("a", 64), "e": ("old", 32)}
        session.check([("a", 103), ("old", 7), ("b", 5), ("c", 1), ("d", 40), ("e", 2)], forks=shared)
        for _ in range(2):
            session.check([(name, 1) for name in ("old", "a", "b", "c", "d", "e")])

    @pytest.mark.parametrize("seed", range(12))
    def test_random_schedules(self, seed: int) -> None:
        """Rows come, share prefixes, get chunks or one token or nothing, and go; their blocks are used again."""
        rng = np.random.default_rng(seed)
        limits = list(LIMITS)[seed % len(LIMITS)]
        block_size = (8, 16, 64)[seed % 3]
        query = self.query("no_groups", "float32", limits, num_heads=2, num_kv_heads=1 + seed % 2, block_size=block_size)
        session = self.session(query, num_blocks=400, seed=seed)
        for step in range(12):
            names = list(session.rows)
            if names and rng.random() < 0.4:
                parent = names[rng.integers(len(names))]
                whole = session.rows[parent].length // query.block_size * query.block_size
                if whole:
                    session.fork(parent, f"fork{step}", whole)
            if len(names) > 4 and rng.random() < 0.5:
                session.forget(names[rng.integers(len(names))])
            names = [*session.rows, f"new{step}"]
            rng.shuffle(names)
            new = [(name, int(rng.choice([0, 1, 1, 1, int(rng.integers(2, 3 * block_size))]))) for name in names]
            session.check([(name, max(count, 1) if name.startswith("new") else count) for name, count in new])

    def test_rows_with_consecutive_blocks(self) -> None:
        session = self.session(self.query(), contiguous=True)
        session.check([("a", 40)])
        session.check([("b", 33), ("a", 1)])
        session.check([("a", 1), ("b", 1)])

    def test_scale_is_the_layers(self) -> None:
        session = self.session(self.query("odd_head"))
        session.layer = dataclasses.replace(session.layer, scale=0.37)
        session.check([("a", 19), ("b", 2)])
        session.check([("a", 1), ("b", 1)])

    def test_large_scores_do_not_overflow(self) -> None:
        session = self.session(self.query("smollm2", "float32"))
        session.layer = dataclasses.replace(session.layer, scale=40.0)
        step = session.prepare([("a", 20), ("b", 1)])
        out = session.run(step)
        assert out.isfinite().all()
        assert (out.cpu().double() - step.expected).abs().max() < 1e-2

    # What may and may not be touched

    @pytest.mark.parametrize("geometry", GEOMETRIES)
    def test_writes_the_mapped_slots_and_no_other(self, geometry: str) -> None:
        import torch

        query = self.query(geometry)
        session = self.session(query)
        session.check([("a", 9), ("b", 4)])
        before = session.caches[0].clone()
        step = session.prepare([("a", 1), ("b", 2 * query.block_size + 3), ("c", 5)])
        session.run(step)
        changed = ~((session.caches[0] == before) | (session.caches[0].isnan() & before.isnan()))
        touched = {int(slot) // query.block_size for slot in step.common.slot_mapping}
        assert set(torch.nonzero(changed.flatten(1).any(1)).flatten().tolist()) == touched
        assert int(changed.sum()) == step.common.num_tokens * 2 * query.num_kv_heads * query.head_size

    @pytest.mark.parametrize("seq_len", [0, 5])
    def test_rows_without_tokens_are_left_alone(self, seq_len: int) -> None:
        session = self.session(self.query())
        session.check([("a", 7), ("pad", seq_len), ("b", 3)])
        session.check([("pad", 0), ("a", 1), ("pad", 0), ("b", 2), ("pad", 0)])
        step = session.prepare([("a", 0), ("b", 0)])
        before = session.caches[0].clone()
        assert session.run(step).shape[0] == 0
        assert session.caches[0].equal(before) or (session.caches[0].isnan() == before.isnan()).all()

    def test_a_row_with_nan_harms_no_other_row(self) -> None:
        session = self.session(self.query())
        session.check([("a", 21), ("bad", 21), ("b", 2)])
        step = session.prepare([("a", 1), ("bad", 1), ("b", 1)])
        for tensor in (step.query, step.key, step.value):
            tensor[1] = float("nan")
        out = session.run(step)
        session.compare(out[[0, 2]], step.expected[[0, 2]])

    def test_a_block_used_again_shows_nothing_of_its_past(self) -> None:
        session = self.session(self.query())
        step = session.prepare([("old", 40)])
        step.key.fill_(float("inf"))
        step.value.fill_(float("nan"))
        session.run(step)
        session.forget("old")
        session.check([("a", 3), ("b", 18)])
        session.check([("a", 1), ("b", 1)])

    def test_a_row_does_not_depend_on_its_neighbours(self) -> None:
        session = self.session(self.query(), num_blocks=128)
        session.check([("a", 37), ("b", 70), ("c", 5)])
        together = session.prepare([("a", 1), ("b", 6), ("c", 1)])
        session.compare(session.run(together), together.expected)
        session.check([("b", 1)])
        session.check([("c", 1), ("a", 1)])

    # The step

    def test_one_metadata_serves_all_layers(self) -> None:
        session = self.session(self.query(), num_layers=3)
        for new in ([("a", 18), ("b", 3)], [("a", 1), ("b", 1), ("c", 20)]):
            step = session.prepare(new)
            metadata = session.backend.build_metadata(step.common)
            outs = [session.run(step, layer=layer, metadata=metadata) for layer in range(3)]
            for out in outs:
                session.compare(out, step.expected)
        assert session.caches[0].nan_to_num().equal(session.caches[2].nan_to_num())

    def test_metadata_made_ahead_stays_valid(self) -> None:
        """The next step's metadata may be built before this step's forward."""
        session = self.session(self.query(), num_blocks=128)
        first = session.prepare([("a", 4), ("b", 30)])
        metadata = session.backend.build_metadata(first.common)
        second = session.prepare([("a", 1), ("b", 1), ("c", 300)])
        ahead = session.backend.build_metadata(second.common)
        session.compare(session.run(first, metadata=metadata), first.expected)
        session.compare(session.run(second, metadata=ahead), second.expected)

    def test_works_in_and_out_of_inference_mode(self) -> None:
        import torch

        session = self.session(self.query())
        with torch.inference_mode():
            session.check([("a", 20), ("b", 1)])
        session.check([("a", 1), ("b", 40)])
        with torch.inference_mode():
            session.check([("a", 1), ("b", 1), ("c", 50)])

    @pytest.mark.parametrize("geometry", GEOMETRIES)
    def test_the_first_dimension_of_the_cache_is_the_block(self, geometry: str) -> None:
        query = self.query(geometry)
        session = self.session(query, num_blocks=40)
        assert session.caches[0].shape[0] == 40
        session.check([("a", 3 * query.block_size + 1)])
        moved = [session.free.pop() for _ in session.rows["a"].blocks]
        for source, target in zip(session.rows["a"].blocks, moved, strict=True):
            session.caches[0][target] = session.caches[0][source]
            session.caches[0][source] = float("nan")
        session.rows["a"].blocks = moved
        session.check([("a", 1)])

    # Selection

    def test_supports_gives_reasons_exactly_when_it_refuses(self) -> None:
        base = AttentionQuery(self.device, "float32", "float32", 8, 4, 64, 16)
        changes: list[dict[str, Any]] = [
            {},
            {"alibi": True},
            {"sinks": True},
            {"dtype": "float64", "kv_dtype": "float64"},
            {"kv_dtype": "float8_e4m3fn"},
            {"device": "a-device-that-does-not-exist"},
            {"num_heads": 7},
        ]
        for change in changes:
            support = self.backend.supports(dataclasses.replace(base, **change))
            assert support.ok == (not support.reasons)
            assert all(isinstance(reason, str) and reason for reason in support.reasons)
        assert not self.backend.supports(dataclasses.replace(base, device="a-device-that-does-not-exist")).ok

    def test_graph_support_is_declared(self) -> None:
        assert self.backend.graph_support in ("never", "decode_only", "always")
        assert self.backend.name
