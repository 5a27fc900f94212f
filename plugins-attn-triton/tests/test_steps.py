"""A step on the host: which kernel computes what. No kernel runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pegboard.contracts.attention import CommonAttentionMetadata
from pegboard_attn_triton.blocks import overlap
from pegboard_attn_triton.steps import choose_splits, persistent_metadata, plan_step, refill, step_metadata

CPU = torch.device("cpu")


def common(*rows: tuple[int, int], width: int = 8, block_size: int = 4) -> CommonAttentionMetadata:
    """Rows as (tokens in the cache, new tokens)."""
    new = [count for _, count in rows]
    return CommonAttentionMetadata(
        query_start_loc=np.cumsum([0, *new]).astype(np.int32),
        seq_lens=np.array([length for length, _ in rows], np.int32),
        block_table=torch.arange(len(rows) * width, dtype=torch.int32).view(len(rows), width),
        slot_mapping=torch.arange(sum(new)) + 100,
        block_size=block_size,
        num_rows=len(rows),
        num_tokens=sum(new),
    )


def test_rows_go_to_decode_or_to_tiles_or_nowhere() -> None:
    step = common((9, 1), (30, 7), (5, 0), (4, 4), (1, 1), (20, 8))
    plan = plan_step(step.query_start_loc, step.seq_lens, 4)
    assert plan.decode_rows.tolist() == [0, 4]
    assert list(zip(plan.tile_rows.tolist(), plan.tile_starts.tolist(), strict=True)) == [(1, 0), (1, 4), (3, 0), (5, 0), (5, 4)]


def test_a_step_without_tokens_has_no_work() -> None:
    step = common((9, 0), (3, 0))
    plan = plan_step(step.query_start_loc, step.seq_lens, 4)
    made = step_metadata(step, plan, 1, 64, CPU)
    assert len(made.decode_rows) == len(made.tile_rows) == 0
    assert made.seq_lens.tolist() == [9, 3]
    assert made.query_start.tolist() == [0, 0, 0]


def test_everything_is_sent_as_one_tensor() -> None:
    step = common((9, 1), (30, 7))
    made = step_metadata(step, plan_step(step.query_start_loc, step.seq_lens, 4), 1, 64, CPU)
    parts = (made.seq_lens, made.query_start, made.decode_rows, made.tile_rows, made.tile_starts)
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert all(part.dtype == torch.int32 for part in parts)


@pytest.mark.parametrize(
    ("rows", "kv_heads", "longest", "expected"),
    [
        (1, 8, 100_000, 32),
        (1, 1, 100_000, 128),
        (64, 8, 100_000, 1),
        (1, 8, 300, 1),
        (1, 8, 1024, 4),
        (4, 8, 100_000, 8),
        (0, 8, 0, 1),
    ],
)
def test_splits_fill_the_device_but_stay_long_enough(rows: int, kv_heads: int, longest: int, expected: int) -> None:
    assert choose_splits(rows, kv_heads, longest, block_n=64, processors=132) == expected


def test_refilling_keeps_the_buffers_and_makes_the_rest_padding() -> None:
    made = persistent_metadata(4, 6, 2, CPU)
    buffers = [made.slots, made.block_table, made.seq_lens, made.query_start, made.decode_rows]
    places = [buffer.data_ptr() for buffer in buffers]
    assert made.slots.tolist() == [-1] * 4
    refill(made, common((9, 1), (17, 1), (3, 1)))
    assert made.seq_lens.tolist() == [9, 17, 3, 0]
    assert made.slots.tolist() == [100, 101, 102, -1]
    assert made.block_table[1, :6].tolist() == [8, 9, 10, 11, 12, 13]
    refill(made, common((5, 1), width=2))
    assert made.seq_lens.tolist() == [5, 0, 0, 0]
    assert made.slots.tolist() == [100, -1, -1, -1]
    assert [buffer.data_ptr() for buffer in buffers] == places
    assert made.slots is buffers[0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(3, 1)] * 5, "a graph for 4 rows of one token cannot take a step of 5 rows"),
        ([(3, 2), (3, 1)], "cannot take a step of 2 rows with 3 tokens"),
        ([(3, 0), (3, 1)], "cannot take a step of 2 rows with 1 tokens"),
        ([(25, 1)], "a graph for rows of 6 blocks cannot take one of 7"),
    ],
)
def test_what_does_not_fit_is_refused(rows: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refill(persistent_metadata(4, 6, 2, CPU), common(*rows))


def test_overlapping_pairs_are_seen() -> None:
    assert not overlap(torch.tensor([[1, 2], [1, 3]]))
    assert overlap(torch.tensor([[1, 2], [2, 3]]))
    assert overlap(torch.tensor([[1, 1]]))
