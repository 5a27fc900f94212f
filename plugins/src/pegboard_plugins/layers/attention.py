"""The seam between a model's attention layer and the attention backend."""

from __future__ import annotations

import torch

from pegboard.contracts.attention import AttentionLayer
from pegboard.contracts.model import ForwardContext


def attend(
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: ForwardContext,
    out: torch.Tensor,
) -> torch.Tensor:
    """Attention of one layer over its paged cache. ``query`` and ``out`` [T, heads, head_size], ``key`` and ``value``
    [T, kv_heads, head_size]; the inputs may be views with gaps between their rows.

    Without caches (the memory phase) nothing is attended to and ``out`` is zeros: the step then needs the activations of
    a real one, but no blocks.
    """
    if context.kv_caches is None:
        return out.zero_()
    return context.backend.forward(layer, query, key, value, context.kv_caches[layer.name], context.metadata, out)
