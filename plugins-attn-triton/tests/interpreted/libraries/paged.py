"""What the stand-ins for libraries share: attention computed from the very arguments that they get, token by token."""

from __future__ import annotations

import torch

from pegboard.contracts.attention import AttentionLayer
from pegboard.testing.reference_attention import attend


def gather(pages: torch.Tensor, ids: torch.Tensor, length: int) -> torch.Tensor:
    """The first ``length`` tokens in the pages [pages, page_size, heads, size] with these ids."""
    return torch.cat([pages[int(page)] for page in ids])[:length]


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    window_left: int,
    soft_cap: float,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last ``len(query)`` tokens over ``keys`` and ``values`` [length, heads, size], causally."""
    layer = AttentionLayer(
        "layer",
        query.shape[1],
        keys.shape[1],
        query.shape[2],
        scale,
        sliding_window=None if window_left < 0 else window_left + 1,
        logits_soft_cap=soft_cap or None,
        alibi_slopes=slopes,
    )
    return attend(layer, query, keys, values).to(query.dtype)


def check(tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    assert tensor.dtype == dtype, (tensor.dtype, dtype)
    assert tuple(tensor.shape) == shape, (tensor.shape, shape)
    assert tensor.stride(-1) == 1
