"""Where a token's key and value live in the cache, how they are written there and copied out.

One layer's cache is ``[num_blocks, 2, num_kv_heads, block_size, head_size]``: key and value of one block lie side by side,
and each head's tokens of one block are one run of memory. So a gather copies whole runs (keys and values in one operation,
sorted by head on the way), and a block can be copied or moved by its first index.
"""

from __future__ import annotations

import torch

from pegboard_plugins.attention.stored import movable

KV_LAYOUT = "block kv head token dim"
"""Backends of other packages that say the same can share a cache with this one."""

WORDWISE_ROWS = 128
"""From so many rows on, writing them as 64-bit words saves more than making the views costs."""


def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, int, int, int, int]:
    """``[num_blocks, 2 (key, value), num_kv_heads, block_size, head_size]``."""
    return (num_blocks, 2, num_kv_heads, block_size, head_size)


def slot_rows(slot_mapping: torch.Tensor, block_size: int, num_kv_heads: int) -> torch.Tensor:
    """The rows that belong to each slot, in the cache seen as ``[rows, head_size]``.

    Returns int64 ``[T * 2 * num_kv_heads]``: per token its key heads, then its value heads.
    """
    block = torch.div(slot_mapping, block_size, rounding_mode="floor")
    runs = torch.arange(2 * num_kv_heads, device=slot_mapping.device)
    first = block * (2 * num_kv_heads * block_size) + (slot_mapping - block * block_size)
    return (first.unsqueeze(1) + runs * block_size).view(-1)


def write_tokens(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, rows: torch.Tensor) -> None:
    """Store ``key`` and ``value`` ``[T, num_kv_heads, head_size]``, of the cache's type, in the rows that ``slot_rows`` gave."""
    head_size = key.shape[2]
    cache, new = kv_cache.view(-1, head_size), torch.stack((key, value), 1).view(-1, head_size)
    cache, new = movable(cache), movable(new)
    if len(rows) >= WORDWISE_ROWS and head_size * new.itemsize % 8 == 0:
        # Scattering costs per element, so move eight bytes as one; they are not computed with.
        cache, new = cache.view(torch.float64), new.view(torch.float64)
    cache.index_copy_(0, rows, new)


def run_index(blocks: torch.Tensor, num_kv_heads: int, *, by_head: bool = False) -> torch.Tensor:
    """Which runs to copy so that ``blocks`` ``[N, blocks]`` come out of the cache seen as ``[runs, block_size * head_size]``.

    Returns int64 ``[2 * N * num_kv_heads * blocks]``; what it copies is ``[2, N, num_kv_heads, blocks * block_size, head_size]``,
    or ``[2, num_kv_heads, N, …]`` with ``by_head``.
    """
    runs = torch.arange(2 * num_kv_heads, device=blocks.device).view(2, num_kv_heads)
    first = blocks * (2 * num_kv_heads)
    if by_head:
        return (first + runs.view(2, num_kv_heads, 1, 1)).view(-1)
    return (first.unsqueeze(1) + runs.view(2, 1, num_kv_heads, 1)).view(-1)
