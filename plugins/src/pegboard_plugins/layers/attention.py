"""The seam between a model's attention layer and the attention backend."""

from __future__ import annotations

from collections.abc import Callable

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

    Without caches nothing is attended to and ``out`` is zeros: the step then needs the activations of a real one, but no blocks.
    """
    return _seam(layer, query, key, value, context, out)


def _attend(
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: ForwardContext,
    out: torch.Tensor,
) -> torch.Tensor:
    if context.kv_caches is None:
        return out.zero_()
    group = context.attention[layer.name]
    return group.backend.forward(layer, query, key, value, context.kv_caches[layer.name], group.metadata, out)


_seam: Callable[..., torch.Tensor] = _attend


def leave_out_of_compilation() -> None:
    """Called before a model is compiled: compiled code then calls attention and does not look inside. Not so from the beginning,
    because torch's compiler takes a second to import."""
    global _seam
    if _seam is _attend:
        _seam = torch._dynamo.disable(_attend)
