"""Paged attention written to be obviously right: one row, one head, one query token at a time, in float32 (float64 inputs stay).

The yardstick of the attention conformance tests, and the backend of model tests. It implements the whole contract, so it can
also serve an engine, slowly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pegboard.contracts.attention import (
    FLOAT8_LIMIT,
    INT8_LIMIT,
    AttentionLayer,
    AttentionQuery,
    CommonAttentionMetadata,
    SplitAttentionBackend,
    Support,
)

if TYPE_CHECKING:
    from torch import Tensor


class ReferenceAttentionBackend(SplitAttentionBackend):
    """The cache is [num_blocks, 2, block_size, num_kv_heads, head_size]: keys, then values."""

    name = "reference"
    kv_layout = "block kv token head dim"

    def __init__(self, query: AttentionQuery | None = None, device: Any = None) -> None:
        self.query = query

    @classmethod
    def supports(cls, query: AttentionQuery) -> Support:
        return Support.of(_device_problem(query.device))

    @classmethod
    def kv_cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    def build_metadata(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return common

    def store(self, layer: AttentionLayer, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: Any) -> None:
        common: CommonAttentionMetadata = metadata
        keys = to_stored(key, layer.key_scale, kv_cache.dtype)
        values = to_stored(value, layer.value_scale, kv_cache.dtype)
        for token in range(common.num_tokens):
            slot = int(common.slot_mapping[token])
            block, offset = divmod(slot, common.block_size)
            kv_cache[block, 0, offset] = keys[token]
            kv_cache[block, 1, offset] = values[token]

    def attend(self, layer: AttentionLayer, query: Tensor, kv_cache: Tensor, metadata: Any, out: Tensor) -> Tensor:
        common: CommonAttentionMetadata = metadata
        for row in range(common.num_rows):
            start, end = int(common.query_start_loc[row]), int(common.query_start_loc[row + 1])
            if end > start:
                keys, values = gather_row(kv_cache, common, row)
                keys, values = from_stored(keys, layer.key_scale), from_stored(values, layer.value_scale)
                out[start:end] = attend(layer, query[start:end], keys, values).to(out.dtype)
        return out


def _device_problem(device: str) -> str | None:
    try:
        torch.device(device)
    except RuntimeError:
        return f"torch knows no device {device!r}"
    return None


def to_stored(values: Tensor, scale: float | Tensor | None, dtype: torch.dtype) -> Tensor:
    """Keys or values [T, num_kv_heads, head_size] as a cache of ``dtype`` holds them: divided by ``scale``, a number or one per
    head, in float32; rounded and cut off as the contract says."""
    if scale is None and dtype == values.dtype:
        return values
    scaled = values.float() if scale is None else values.float() / _by_head(scale)
    if dtype == torch.int8:
        return scaled.round().clamp(-INT8_LIMIT, INT8_LIMIT).to(dtype)
    return scaled.clamp(-FLOAT8_LIMIT, FLOAT8_LIMIT).to(dtype) if dtype == torch.float8_e4m3fn else scaled.to(dtype)


def from_stored(values: Tensor, scale: float | Tensor | None) -> Tensor:
    """What keys or values [T, num_kv_heads, head_size] out of a cache stand for; in float32 where they have a scale, or are of
    a type that is only stored."""
    narrow = values.dtype in (torch.int8, torch.float8_e4m3fn)
    values = values.float() if narrow or scale is not None else values
    return values if scale is None else values * _by_head(scale)


def _by_head(scale: float | Tensor) -> float | Tensor:
    return scale[:, None].float() if isinstance(scale, torch.Tensor) else scale


def gather_row(kv_cache: Tensor, common: CommonAttentionMetadata, row: int) -> tuple[Tensor, Tensor]:
    """Keys and values of all tokens of one row, each [seq_len, num_kv_heads, head_size]."""
    seq_len = int(common.seq_lens[row])
    blocks = [int(common.block_table[row, i // common.block_size]) for i in range(seq_len)]
    keys = torch.stack([kv_cache[block, 0, i % common.block_size] for i, block in enumerate(blocks)])
    values = torch.stack([kv_cache[block, 1, i % common.block_size] for i, block in enumerate(blocks)])
    return keys, values


def attend(layer: AttentionLayer, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of the last ``len(query)`` tokens of a row over the whole row.

    ``query`` [query_len, num_heads, head_size]; ``keys`` and ``values`` [seq_len, num_kv_heads, head_size].
    """
    precision = torch.promote_types(query.dtype, torch.float32)
    query, keys, values = query.to(precision), keys.to(precision), values.to(precision)
    slopes = None if layer.alibi_slopes is None else layer.alibi_slopes.to(query)
    sinks = None if layer.sinks is None else layer.sinks.to(query)
    group = layer.num_heads // layer.num_kv_heads
    out = torch.empty_like(query)
    first = keys.shape[0] - query.shape[0]
    for i in range(query.shape[0]):
        position = first + i
        oldest = 0 if layer.sliding_window is None else max(0, position - layer.sliding_window + 1)
        for head in range(layer.num_heads):
            visible = keys[oldest : position + 1, head // group]
            scores = visible @ query[i, head] * layer.scale
            if layer.logits_soft_cap is not None:
                scores = layer.logits_soft_cap * torch.tanh(scores / layer.logits_soft_cap)
            if slopes is not None:
                scores = scores + slopes[head] * torch.arange(oldest - position, 1, device=query.device)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1]])
            weights = torch.softmax(scores, dim=0)[: position + 1 - oldest]
            out[i, head] = weights @ values[oldest : position + 1, head // group]
    return out
