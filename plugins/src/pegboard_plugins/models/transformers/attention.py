"""The seam between transformers' attention interface and paged attention: one function that every layer calls.

The attention backend alone knows which request a token belongs to: no mask is made, and no cache of transformers' is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers import AttentionInterface

from pegboard.contracts.attention import AttentionLayer
from pegboard.contracts.model import ForwardContext
from pegboard_plugins.layers.attention import attend

PAGED: Final = "pegboard"
"""The name of this attention in a transformers configuration. There is no mask function of that name: masks are None then."""

_SLOT: Final = "pegboard_slot"


@dataclass(slots=True)
class Step:
    """What the layers of one model need of the step that is running. Without a context each token attends to itself alone."""

    context: ForwardContext | None = None
    prompt_lens: torch.Tensor | None = None
    """[T], see ``ForwardContext``; for rotary frequencies that depend on it."""
    incoming: torch.Tensor | None = None
    """[1, T, width] from the pipeline stage before."""


@dataclass(slots=True)
class Slot:
    """One attention module's place in the engine."""

    layer: AttentionLayer
    step: Step = field(repr=False)


def put_slot(module: torch.nn.Module, slot: Slot) -> None:
    setattr(module, _SLOT, slot)


def paged_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """``query`` [1, heads, T, head_size], ``key`` and ``value`` [1, kv_heads, T, head_size] to [1, T, heads, head_size].

    Scale, window and the like were found when the model was made: they are constants of the layer.
    """
    slot: Slot = getattr(module, _SLOT)
    heads, keys, values = (_rows(x, value.dtype) for x in (query, key, value))
    context = slot.step.context
    out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    if context is None:
        _attend_to_itself(heads, keys, values, out)
    else:
        attend(slot.layer, heads, keys, values, context, out)
    return out.to(query.dtype)[None], None


def _rows(heads: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[1, heads, T, head_size] as [T, heads, head_size]; numbers of one head adjacent."""
    rows = heads[0].transpose(0, 1).to(dtype)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _attend_to_itself(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> None:
    """Some function of a token's own query, key and value, to see whether tokens influence each other outside of attention."""
    groups = query.shape[1] // key.shape[1]
    out.copy_((value * torch.tanh(key)).repeat_interleave(groups, 1) + torch.tanh(query))


AttentionInterface.register(PAGED, paged_attention)
