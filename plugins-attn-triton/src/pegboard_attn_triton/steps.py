"""One step as the kernels read it: a few small tensors, filled from host arithmetic by one copy that waits for nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pegboard.contracts.attention import CommonAttentionMetadata


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Which kernel computes what; host arrays, int32."""

    decode_rows: np.ndarray
    """[D] rows with one new token."""
    tile_rows: np.ndarray
    """[P] for each tile of a prefill program its row."""
    tile_starts: np.ndarray
    """[P] and its first token, counted among the row's new ones."""


@dataclass(slots=True)
class StepMetadata:
    """One step. All tensors are on the device."""

    slots: torch.Tensor
    """[T] int64; negative: padding, which is not stored."""
    block_table: torch.Tensor
    """[B, max_blocks] int32."""
    seq_lens: torch.Tensor
    """[B] int32."""
    query_start: torch.Tensor
    """[B + 1] int32."""
    decode_rows: torch.Tensor
    """[D] int32."""
    tile_rows: torch.Tensor
    """[P] int32."""
    tile_starts: torch.Tensor
    """[P] int32."""
    num_splits: int
    """In how many parts the context of a decode row is read."""
    block_m: int
    """Queries (tokens times heads of a group) per tile."""


def plan_step(query_start_loc: np.ndarray, seq_lens: np.ndarray, tokens_per_tile: int) -> StepPlan:
    """Rows with one new token are decode rows; those with more are cut into tiles; those with none are left out."""
    query_lens = np.diff(query_start_loc)
    rows = np.flatnonzero(query_lens > 1)
    tiles = -(-query_lens[rows] // tokens_per_tile)
    tile_rows = np.repeat(rows, tiles)
    first = np.cumsum(tiles) - tiles
    tile_starts = (np.arange(len(tile_rows)) - np.repeat(first, tiles)) * tokens_per_tile
    return StepPlan(np.flatnonzero(query_lens == 1).astype(np.int32), tile_rows.astype(np.int32), tile_starts.astype(np.int32))


def choose_splits(num_rows: int, num_kv_heads: int, longest: int, block_n: int, processors: int, most: int = 128) -> int:
    """How many programs share the context of one row and head: a power of two, so that there are about two programs per
    ``processor``, but each has at least four tiles of ``block_n`` keys of the ``longest`` row."""
    programs = max(num_rows * num_kv_heads, 1)
    wanted = min(2 * processors // programs, longest // (4 * block_n), most)
    return 1 if wanted < 2 else 1 << (wanted.bit_length() - 1)


def send(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """int32 arrays to the device, as parts of one tensor. From pinned memory, which torch keeps until the copy has run."""
    sizes = [len(array) for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type != "cpu")
    np.concatenate(arrays, out=host.numpy(), casting="same_kind")
    return list(host.to(device, non_blocking=True).split(sizes))


def step_metadata(
    common: CommonAttentionMetadata, plan: StepPlan, num_splits: int, block_m: int, device: torch.device
) -> StepMetadata:
    """``plan`` on the device, with what else ``common`` holds."""
    seq_lens, query_start, decode_rows, tile_rows, tile_starts = send(
        [common.seq_lens, common.query_start_loc, plan.decode_rows, plan.tile_rows, plan.tile_starts], device
    )
    return StepMetadata(
        common.slot_mapping, common.block_table, seq_lens, query_start, decode_rows, tile_rows, tile_starts, num_splits, block_m
    )


def persistent_metadata(num_rows: int, max_blocks: int, num_splits: int, device: torch.device) -> StepMetadata:
    """A step of ``num_rows`` decode rows in buffers of its own; all of them padding: length 0, and nothing to store."""
    rows = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    none = torch.empty(0, dtype=torch.int32, device=device)
    return StepMetadata(
        slots=torch.full((num_rows,), -1, dtype=torch.int64, device=device),
        block_table=torch.zeros((num_rows, max_blocks), dtype=torch.int32, device=device),
        seq_lens=torch.zeros(num_rows, dtype=torch.int32, device=device),
        query_start=rows,
        decode_rows=rows[:num_rows],
        tile_rows=none,
        tile_starts=none,
        num_splits=num_splits,
        block_m=16,
    )


def refill(metadata: StepMetadata, common: CommonAttentionMetadata) -> None:
    """Put a step of decode rows into what ``persistent_metadata`` made. Raises ``ValueError`` where it does not fit."""
    rows, blocks = metadata.block_table.shape
    used, width = common.block_table.shape
    if used > rows or (np.diff(common.query_start_loc) != 1).any():
        raise ValueError(
            f"a graph for {rows} rows of one token cannot take a step of {used} rows with {common.num_tokens} tokens; "
            "run it without a graph, or with one that was captured for more rows"
        )
    needed = -(-int(common.seq_lens.max(initial=0)) // common.block_size)
    if needed > blocks:
        raise ValueError(f"a graph for rows of {blocks} blocks cannot take one of {needed}; run the step without a graph")
    width = min(width, blocks)
    lengths = np.zeros(rows, np.int32)
    lengths[:used] = common.seq_lens
    metadata.seq_lens.copy_(send([lengths], metadata.seq_lens.device)[0])
    metadata.block_table[:used, :width].copy_(common.block_table[:, :width])
    metadata.slots[:used].copy_(common.slot_mapping)
    metadata.slots[used:].fill_(-1)
