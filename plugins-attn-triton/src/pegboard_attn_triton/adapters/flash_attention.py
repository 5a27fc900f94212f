"""FlashAttention on the shared cache: version 2 (package ``flash-attn`` 2.6 and later) and version 3 for Hopper (module
``flash_attn_interface``, built from the same repository's folder ``hopper``).

Both attend to a whole step at once: queries of all rows one after the other, keys and values by block table. Storing is this
package's kernel.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
import torch

from pegboard.contracts.attention import AttentionLayer, AttentionQuery, CommonAttentionMetadata, Support
from pegboard_attn_triton import support
from pegboard_attn_triton.backend import PagedBackend
from pegboard_attn_triton.layout import keys_and_values
from pegboard_attn_triton.steps import send

DTYPES = ("bfloat16", "float16")
PAGE = 256
"""FlashAttention 2 takes pages of a multiple of so many tokens."""


@dataclass(slots=True)
class FlashMetadata:
    """One step as FlashAttention takes it; tensors int32 on the device."""

    slots: torch.Tensor
    block_table: torch.Tensor
    """[B, max_blocks]."""
    query_start: torch.Tensor
    """[B + 1] cumulated new tokens."""
    key_start: torch.Tensor
    """[B + 1] cumulated lengths of the rows."""
    seq_lens: torch.Tensor
    """[B]."""
    longest_query: int
    longest_row: int


class FlashBackend(PagedBackend):
    """What both versions share."""

    @classmethod
    def problems(cls, query: AttentionQuery) -> list[str | None]:
        """Reasons that hold for both versions."""
        return [
            *support.kernel_problems(query),
            support.one_of("dtype", query.dtype, DTYPES),
            None if query.kv_dtype == query.dtype else f"cache dtype {query.kv_dtype!r} differs from dtype {query.dtype!r}",
            *support.shape_problems(query),
            "attention sinks are not supported" if query.sinks else None,
            "scales of cached keys and values are not supported" if query.kv_scales != "none" else None,
        ]

    def build_metadata(self, common: CommonAttentionMetadata) -> FlashMetadata:
        key_start = np.concatenate([[0], np.cumsum(common.seq_lens)]).astype(np.int32)
        starts, lengths, keys = send([common.query_start_loc, common.seq_lens, key_start], self.device)
        longest_query = int(np.diff(common.query_start_loc).max(initial=0))
        longest_row = int(common.seq_lens.max(initial=0))
        return FlashMetadata(common.slot_mapping, common.block_table, starts, keys, lengths, longest_query, longest_row)

    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, metadata: FlashMetadata, out: torch.Tensor
    ) -> torch.Tensor:
        if len(query):
            window = (-1, -1) if layer.sliding_window is None else (layer.sliding_window - 1, 0)
            out.copy_(self.call(layer, query, *keys_and_values(kv_cache), metadata, window))
        return out

    @abc.abstractmethod
    def call(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: FlashMetadata,
        window: tuple[int, int],
    ) -> torch.Tensor:
        """Attention by the library. ``query`` [T, heads, head_size], ``keys`` and ``values`` [blocks, block_size, kv_heads,
        head_size] with gaps between rows; ``window``: tokens before and after a query that it sees, or -1."""


class FlashAttention2Backend(FlashBackend):
    """``flash_attn.flash_attn_varlen_func`` with a block table."""

    name: ClassVar[str] = "flash_attn"

    @classmethod
    def supports(cls, query: AttentionQuery) -> Support:
        size = query.block_size
        return Support.of(
            support.library_problem("flash-attn", (2, 6), "pip install flash-attn"),
            *cls.problems(query),
            f"block size {size} is no multiple of {PAGE} (set kv_cache.block_size)" if size % PAGE else None,
        )

    def call(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: FlashMetadata,
        window: tuple[int, int],
    ) -> torch.Tensor:
        from flash_attn import flash_attn_varlen_func

        attended: torch.Tensor = flash_attn_varlen_func(
            query,
            keys,
            values,
            cu_seqlens_q=metadata.query_start,
            cu_seqlens_k=metadata.key_start,
            max_seqlen_q=metadata.longest_query,
            max_seqlen_k=metadata.longest_row,
            softmax_scale=layer.scale,
            causal=True,
            window_size=window,
            softcap=layer.logits_soft_cap or 0.0,
            alibi_slopes=layer.alibi_slopes,
            block_table=metadata.block_table,
        )
        return attended


class FlashAttention3Backend(FlashBackend):
    """``flash_attn_interface.flash_attn_with_kvcache``, which takes rows of any number of new tokens and pages of any size."""

    name: ClassVar[str] = "flash_attn_3"

    @classmethod
    def supports(cls, query: AttentionQuery) -> Support:
        return Support.of(
            None if find_spec("flash_attn_interface") else "flash_attn_interface is not installed (FlashAttention 3, for Hopper)",
            *cls.problems(query),
            _not_hopper(query),
            "ALiBi is not supported" if query.alibi else None,
        )

    def call(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: FlashMetadata,
        window: tuple[int, int],
    ) -> torch.Tensor:
        from flash_attn_interface import flash_attn_with_kvcache

        attended: Any = flash_attn_with_kvcache(
            query,
            keys,
            values,
            cache_seqlens=metadata.seq_lens,
            page_table=metadata.block_table,
            cu_seqlens_q=metadata.query_start,
            max_seqlen_q=metadata.longest_query,
            softmax_scale=layer.scale,
            causal=True,
            window_size=window,
            softcap=layer.logits_soft_cap or 0.0,
        )
        return attended  # type: ignore[no-any-return]


def _not_hopper(query: AttentionQuery) -> str | None:
    found = support.device.capability() if query.device.startswith("cuda") else (9, 0)
    return None if found is None or found[0] == 9 else f"compute capability {support.dotted(found)} is not that of a Hopper (9.0)"
