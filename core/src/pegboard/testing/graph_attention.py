"""GraphableAttention: paged attention in a few whole-tensor operations, which graphs can be captured of on any device. Slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from pegboard.contracts.attention import (
    AttentionLayer,
    AttentionQuery,
    CommonAttentionMetadata,
    GraphSupport,
    SplitAttentionBackend,
    Support,
)


@dataclass(slots=True)
class TokenMetadata:
    """Every token by itself. T tokens."""

    slots: torch.Tensor
    """[T] int64; negative: padding."""
    table: torch.Tensor
    """[T, max_blocks] int32, of the token's row."""
    lengths: torch.Tensor
    """[T] int64: tokens that it sees, without the window; 0: padding."""


class GraphableAttention(SplitAttentionBackend):
    """The cache is [num_blocks, 2, block_size, num_kv_heads, head_size]. Every token reads all blocks of its row."""

    name: ClassVar[str] = "graphable"
    graph_support: ClassVar[GraphSupport] = "decode_only"
    kv_layout: ClassVar[str] = "block kv token head dim"

    def __init__(self, query: AttentionQuery, device: torch.device | str | None = None) -> None:
        self.device = torch.device(query.device if device is None else device)

    @classmethod
    def supports(cls, query: AttentionQuery) -> Support:
        return Support.of(
            "it has no ALiBi" if query.alibi else None,
            "it has no sinks" if query.sinks else None,
            "it stores keys and values as they are" if query.kv_scales != "none" or query.kv_dtype != query.dtype else None,
        )

    @classmethod
    def kv_cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    def build_metadata(self, common: CommonAttentionMetadata) -> TokenMetadata:
        counts = np.diff(common.query_start_loc)
        rows = np.repeat(np.arange(common.num_rows), counts)
        before = common.seq_lens - counts - common.query_start_loc[:-1]
        lengths = np.arange(common.num_tokens) + before[rows] + 1
        return TokenMetadata(common.slot_mapping, common.block_table[rows], torch.from_numpy(lengths).to(self.device))

    def graph_metadata(self, num_rows: int, max_blocks: int) -> TokenMetadata:
        return TokenMetadata(
            torch.full((num_rows,), -1, dtype=torch.int64, device=self.device),
            torch.zeros((num_rows, max_blocks), dtype=torch.int32, device=self.device),
            torch.zeros(num_rows, dtype=torch.int64, device=self.device),
        )

    def refill(self, metadata: TokenMetadata, common: CommonAttentionMetadata) -> None:
        rows, blocks = metadata.table.shape
        needed = -(-int(common.seq_lens.max(initial=0)) // common.block_size)
        if common.num_rows > rows or needed > blocks:
            raise ValueError(
                f"a graph for {rows} rows of {blocks} blocks cannot take a step of {common.num_rows} rows of {needed}"
            )
        used, width = common.num_rows, min(common.block_table.shape[1], blocks)
        metadata.slots[used:].fill_(-1)
        metadata.slots[:used].copy_(common.slot_mapping)
        metadata.table[:used, :width].copy_(common.block_table[:, :width])
        metadata.lengths.zero_()
        metadata.lengths[:used].copy_(torch.from_numpy(common.seq_lens))

    def store(
        self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, metadata: TokenMetadata
    ) -> None:
        """Padding stores what the first token stores, where that does; if all is padding, what is there already."""
        block_size = kv_cache.shape[2]
        first = metadata.slots[:1].clamp(min=0)
        slots = torch.where(metadata.slots < 0, first, metadata.slots)
        is_padding = (metadata.slots < 0)[:, None, None]
        blocks, offsets = slots // block_size, slots % block_size
        for part, new in ((0, key), (1, value)):
            there = kv_cache[first // block_size, part, first % block_size]
            of_first = torch.where(is_padding[:1], there, new[:1])
            kv_cache[blocks, part, offsets] = torch.where(is_padding, of_first, new)

    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, out: torch.Tensor
    ) -> torch.Tensor:
        cached = kv_cache[metadata.table].transpose(1, 2).flatten(2, 3)
        places = torch.arange(cached.shape[2], device=query.device)
        seen = places < metadata.lengths[:, None]
        if layer.sliding_window is not None:
            seen = seen & (places >= metadata.lengths[:, None] - layer.sliding_window)
        keys, values = torch.where(seen[:, None, :, None, None], cached, 0).float().unbind(1)
        grouped = query.float().reshape(len(query), layer.num_kv_heads, layer.num_heads // layer.num_kv_heads, layer.head_size)
        scores = torch.einsum("tkgd,tlkd->tkgl", grouped, keys) * layer.scale
        if layer.logits_soft_cap is not None:
            scores = layer.logits_soft_cap * torch.tanh(scores / layer.logits_soft_cap)
        weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1).nan_to_num()
        return out.copy_(torch.einsum("tkgl,tlkd->tkgd", weights, values).reshape(out.shape))
