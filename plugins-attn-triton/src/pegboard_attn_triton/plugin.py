"""Attention backends for NVIDIA GPUs, offered to Pegboard. Imports no part, no torch and no triton."""

from __future__ import annotations

import os
from collections.abc import Iterable

from pegboard.plugins import AttentionBackendProvider, hookimpl

_HERE = "pegboard_attn_triton"


def _priority(ordinary: int) -> int:
    """Interpreted kernels are for tests: only who names them gets them."""
    return -100 if os.environ.get("TRITON_INTERPRET") else ordinary


@hookimpl
def attention_backends() -> Iterable[AttentionBackendProvider]:
    yield AttentionBackendProvider(
        name="triton",
        target=f"{_HERE}.backend:TritonAttentionBackend",
        priority=_priority(20),
        summary="Triton kernels for CUDA devices: windows, soft cap, ALiBi, sinks, int8 and float8 caches",
    )
    yield AttentionBackendProvider(
        name="flash_attn",
        target=f"{_HERE}.adapters.flash_attention:FlashAttention2Backend",
        priority=_priority(10),
        summary="FlashAttention 2, where flash_attn is installed",
    )
    yield AttentionBackendProvider(
        name="flash_attn_3",
        target=f"{_HERE}.adapters.flash_attention:FlashAttention3Backend",
        priority=_priority(15),
        summary="FlashAttention 3 for Hopper, where flash_attn_interface is installed",
    )
    yield AttentionBackendProvider(
        name="flashinfer",
        target=f"{_HERE}.adapters.flashinfer:FlashInferBackend",
        priority=_priority(12),
        summary="FlashInfer, where it is installed",
    )
