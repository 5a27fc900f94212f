"""From layers and tensors to kernel launches: grids, strides and constants. A launch can also be compiled without a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from pegboard.contracts.attention import AttentionLayer
from pegboard_attn_triton.kernels.blocks import copy_blocks_kernel
from pegboard_attn_triton.kernels.decode import decode_kernel, reduce_kernel
from pegboard_attn_triton.kernels.prefill import prefill_kernel
from pegboard_attn_triton.kernels.store import store_kernel
from pegboard_attn_triton.steps import StepMetadata
from pegboard_attn_triton.tuning.config import KernelConfig, group_pad, head_pad

_KINDS = {torch.int8: "int8", torch.float8_e4m3fn: "float8"}
_REDUCED = (
    "out", "seq_lens", "query_start", "sinks", "stride_out_token", "stride_out_head", "HEAD", "HEAD_PAD", "WINDOW", "SINKS",
)  # fmt: skip
"""What the sum over splits takes of the arguments of the first kernel."""
STORED_ROWS, INTERPRETED_ROWS = 16, 1024
"""Pairs of token and head that one program stores; the interpreter takes as long for many as for few."""
COPY_CHUNK = 4096
"""Words of four bytes that one program copies."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel with all its arguments, by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int = 1

    def run(self) -> None:
        """Launch it on the current device and stream. An empty grid is no launch."""
        if all(self.grid):
            self.kernel[self.grid](**self.arguments, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told. That products and sums are fused is said, as triton's default for it changes."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


def store(layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> Launch:
    """Write ``key`` and ``value`` [T, num_kv_heads, head_size] into ``slots`` [T]."""
    _, _, num_kv_heads, block_size, head_size = kv_cache.shape
    num_rows = key.shape[0] * num_kv_heads
    kind = _KINDS.get(kv_cache.dtype, "plain")
    rows = STORED_ROWS if key.device.type != "cpu" else INTERPRETED_ROWS
    arguments = {
        "key": key,
        "value": value,
        "cache": kv_cache.view(torch.uint8) if kind == "float8" else kv_cache,
        "slots": slots,
        "key_scale": layer.key_scale,
        "value_scale": layer.value_scale,
        "stride_key_token": key.stride(0),
        "stride_key_head": key.stride(1),
        "stride_value_token": value.stride(0),
        "stride_value_head": value.stride(1),
        "stride_block": kv_cache.stride(0),
        "num_rows": num_rows,
        "KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": block_size,
        "HEAD": head_size,
        "HEAD_PAD": head_pad(head_size),
        "ROWS": rows,
        "KIND": kind,
        "KEY_SCALES": _scale_kind(layer.key_scale),
        "VALUE_SCALES": _scale_kind(layer.value_scale),
    }
    return Launch(store_kernel, (triton.cdiv(num_rows, rows),), arguments, num_warps=4)


def decode(
    layer: AttentionLayer,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: StepMetadata,
    out: torch.Tensor,
    config: KernelConfig,
    upcast: bool,
) -> list[Launch]:
    """Attention of the rows in ``metadata.decode_rows``; of several splits, the sum comes second."""
    rows, splits = metadata.decode_rows, metadata.num_splits
    num_kv_heads, head_size = kv_cache.shape[2], kv_cache.shape[4]
    group = layer.num_heads // num_kv_heads
    partial = stats = None
    if splits > 1:
        parts = (len(rows), layer.num_heads, splits)
        partial = torch.empty((*parts, head_size), dtype=torch.float32, device=query.device)
        stats = torch.empty((*parts, 2), dtype=torch.float32, device=query.device)
    arguments = {
        **_attention(layer, query, kv_cache, metadata, out, upcast),
        "partial": partial,
        "stats": stats,
        "rows": rows,
        "splits": splits,
        "GROUP_PAD": group_pad(group),
        "BLOCK_N": config.block_n,
        "SPLIT": splits > 1,
    }
    first = Launch(decode_kernel, (len(rows), num_kv_heads, splits), arguments, config.num_warps, config.num_stages)
    if splits == 1:
        return [first]
    reduced = {
        **{name: arguments[name] for name in _REDUCED},
        "partial": partial,
        "stats": stats,
        "rows": rows,
        "HEADS": layer.num_heads,
        "BLOCK_N": config.block_n,
        "SPLITS": splits,
    }
    warps = 4 if splits * head_pad(head_size) <= 8192 else 8
    return [first, Launch(reduce_kernel, (len(rows), layer.num_heads), reduced, warps)]


def prefill(
    layer: AttentionLayer,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: StepMetadata,
    out: torch.Tensor,
    config: KernelConfig,
    upcast: bool,
) -> Launch:
    """Attention of the tiles of ``metadata``, which were made for ``metadata.block_m``."""
    arguments = {
        **_attention(layer, query, kv_cache, metadata, out, upcast),
        "tile_rows": metadata.tile_rows,
        "tile_starts": metadata.tile_starts,
        "BLOCK_M": metadata.block_m,
        "BLOCK_N": config.block_n,
    }
    warps = config.num_warps if metadata.block_m >= config.block_m else min(config.num_warps, 4)
    grid = (len(metadata.tile_rows), kv_cache.shape[2])
    return Launch(prefill_kernel, grid, arguments, warps, config.num_stages)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> Launch:
    """``pairs`` [N, 2] on the device. No target may be a source. Both caches lie without gaps."""
    words = source[0].nbytes // 4
    arguments = {
        "source": _words(source),
        "target": _words(target),
        "pairs": pairs,
        "words": words,
        "stride_source": words,
        "stride_target": words,
        "CHUNK": COPY_CHUNK,
    }
    return Launch(copy_blocks_kernel, (len(pairs), triton.cdiv(words, COPY_CHUNK)), arguments, num_warps=8)


def _attention(
    layer: AttentionLayer,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: StepMetadata,
    out: torch.Tensor,
    upcast: bool,
) -> dict[str, Any]:
    """What decode and prefill kernels have in common."""
    _, _, num_kv_heads, block_size, head_size = kv_cache.shape
    return {
        "query": query,
        "cache": kv_cache,
        "out": out,
        "table": metadata.block_table,
        "seq_lens": metadata.seq_lens,
        "query_start": metadata.query_start,
        "slopes": layer.alibi_slopes,
        "sinks": layer.sinks,
        "key_scale": layer.key_scale,
        "value_scale": layer.value_scale,
        "scale": float(layer.scale),
        "soft_cap": float(layer.logits_soft_cap or 0.0),
        "stride_query_token": query.stride(0),
        "stride_query_head": query.stride(1),
        "stride_out_token": out.stride(0),
        "stride_out_head": out.stride(1),
        "stride_block": kv_cache.stride(0),
        "stride_table": metadata.block_table.stride(0),
        "KV_HEADS": num_kv_heads,
        "GROUP": layer.num_heads // num_kv_heads,
        "BLOCK_SIZE": block_size,
        "HEAD": head_size,
        "HEAD_PAD": head_pad(head_size),
        "WINDOW": layer.sliding_window or 0,
        "SOFT_CAP": layer.logits_soft_cap is not None,
        "ALIBI": layer.alibi_slopes is not None,
        "SINKS": layer.sinks is not None,
        "KEY_SCALES": _scale_kind(layer.key_scale),
        "VALUE_SCALES": _scale_kind(layer.value_scale),
        "UPCAST": upcast,
    }


def _scale_kind(scale: float | torch.Tensor | None) -> str:
    if scale is None:
        return "none"
    return "head" if isinstance(scale, torch.Tensor) else "tensor"


def _words(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(-1).view(torch.int32)
