from __future__ import annotations

import dataclasses

import numpy as np
import torch

from pegboard_plugins.attention.cache_layout import WORDWISE_ROWS, kv_cache_shape, slot_rows, write_tokens
from pegboard_plugins.attention.plan import groups, sections, shared_sets
from pegboard_plugins.attention.rows import RowSet
from pegboard_plugins.attention.shape import CPU, Shape
from pegboard_plugins.attention.workspace import Workspace

SHAPE = Shape(num_heads=9, num_kv_heads=3, head_size=64, block_size=16, itemsize=2, limits=CPU)


def rows_of(*lengths: tuple[int, int], window: int | None = None) -> RowSet:
    """Rows from (tokens in the cache, new tokens)."""
    start = np.cumsum([0, *(new for _, new in lengths)]).astype(np.int32)
    return RowSet.of(start, np.array([length for length, _ in lengths], np.int32), SHAPE.block_size, window)


def test_sections_join_equal_and_nearly_equal_query_lengths() -> None:
    rows = rows_of((40, 1), (512, 512), (30, 30), (9, 0), (27, 27), (77, 1), (512, 512), (511, 511))
    assert [section.index.tolist() for section in sections(rows)] == [[0, 5], [2, 4], [7], [1, 6]]
    assert sections(rows_of((5, 0))) == []


def test_groups_keep_every_row_and_bound_size_and_padding() -> None:
    rng = np.random.default_rng(0)
    rows = rows_of(*((int(n), 1) for n in rng.integers(1, 3000, 100)))
    parts = groups(rows, SHAPE)
    assert sorted(RowSet.concatenate(parts).index.tolist()) == list(range(100))
    for part in parts:
        used, widest = int(part.num_blocks.sum()), int(part.num_blocks.max())
        assert len(part) * widest - used <= CPU.padding_blocks
        bytes_per_block = 16 * 2 * (2 * 3 * 64 + 9)
        assert len(part) == 1 or len(part) * widest * bytes_per_block <= CPU.group_bytes


def test_rows_of_nearly_equal_context_stay_in_batch_order() -> None:
    assert [part.index.tolist() for part in groups(rows_of((90, 1), (70, 1), (85, 1)), SHAPE)] == [[0, 1, 2]]


def test_a_sliding_window_leaves_out_what_nobody_sees() -> None:
    rows = rows_of((100, 1), (100, 40), (5, 1), window=20)
    assert rows.first_block.tolist() == [80 // 16, 41 // 16, 0]
    assert rows.num_blocks.tolist() == [7 - 5, 7 - 2, 1]


def test_shared_sets_need_blocks_enough() -> None:
    table = np.arange(4 * 40).reshape(4, 40).astype(np.int32)
    table[:3, :33] = table[0, :33]
    rows = rows_of((600, 1), (620, 1), (630, 1), (600, 1))
    small = dataclasses.replace(SHAPE, limits=dataclasses.replace(CPU, shared_blocks=64))
    [(members, common)], others = shared_sets(rows, table, small)
    assert members.index.tolist() == [0, 1, 2]
    assert common == 32, "33 blocks in common, in whole vectors of columns"
    assert others is not None
    assert others.index.tolist() == [3]
    assert shared_sets(rows, table, SHAPE)[0] == []


def test_a_common_prefix_ends_before_the_new_tokens() -> None:
    table = np.zeros((2, 100), np.int32)
    limits = dataclasses.replace(SHAPE, limits=dataclasses.replace(CPU, shared_blocks=1))
    [(_, common)], others = shared_sets(rows_of((500, 30), (480, 30)), table, limits)
    assert common == 450 // 16 // 2 * 2
    assert others is None


def test_writing_moves_bits() -> None:
    """Also those of not-a-number, on both ways of writing."""
    for tokens in (2, WORDWISE_ROWS):
        bits = torch.randint(-(2**15), 2**15, (tokens, 2, 3, 64), dtype=torch.int16)
        key, value = bits.view(torch.bfloat16).unbind(1)
        cache = torch.zeros(kv_cache_shape(tokens, 16, 3, 64), dtype=torch.bfloat16)
        slots = torch.randperm(tokens * 16)[:tokens]
        write_tokens(key, value, cache, slot_rows(slots, 16, 3))
        stored = cache.view(torch.int16).transpose(2, 3).transpose(1, 2).flatten(0, 1)
        assert stored[slots].equal(bits)


def test_workspace_grows_and_keeps_old_views() -> None:
    workspace = Workspace(torch.device("cpu"))
    first = workspace.view("a", torch.float32, 2, 3).fill_(1.0)
    again = workspace.view("a", torch.float32, 3, 2)
    assert again.data_ptr() == first.data_ptr()
    larger = workspace.view("a", torch.float32, 100)
    assert larger.data_ptr() != first.data_ptr()
    assert first.sum() == 6.0
    size = workspace.nbytes
    workspace.view("a", torch.float32, 120)
    assert workspace.nbytes == size
