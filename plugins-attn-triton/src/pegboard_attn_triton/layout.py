"""How one layer's cache lies in memory; all backends of this package share it.

``[num_blocks, 2 (key, value), num_kv_heads, block_size, head_size]``, without gaps but between blocks: the tokens of a head in
one block are one run of memory, so a program that reads one head reads whole cache lines, whatever the number of heads.
FlashInfer calls this layout HND; FlashAttention takes it by strides.
"""

from __future__ import annotations

import torch

KV_LAYOUT = "block kv head token dim"


def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, int, int, int, int]:
    """``[num_blocks, 2 (key, value), num_kv_heads, block_size, head_size]``."""
    return (num_blocks, 2, num_kv_heads, block_size, head_size)


def keys_and_values(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views ``[num_blocks, block_size, num_kv_heads, head_size]``, as FlashAttention takes them: rows have gaps."""
    keys, values = kv_cache.transpose(2, 3).unbind(1)
    return keys, values
