"""What the masks mean that a transformers model asks for: which keys a query sees, found by asking the mask's own rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

MaskRule = Callable[[Any, Any, Any, Any], Any]
"""(batch, head, query index, key index) to whether the key is seen."""

_FAR: Final = 1 << 18
"""A window that reaches so far counts as none."""
_QUERIES: Final = (_FAR, _FAR - 777, 100_003, 1_000, 5)


@dataclass(frozen=True, slots=True)
class Causal:
    """Each query sees itself and the ``window - 1`` keys before it, or all of them."""

    window: int | None


def meaning(rule: MaskRule) -> Causal | None:
    """None for a rule that is neither causal nor a sliding window, or that cannot be asked."""
    try:
        seen = [_seen(rule, query) for query in _QUERIES]
    except Exception:  # a rule may depend on tensors of the step, which have no values here
        return None
    window = int(seen[0].sum())
    full = window == _FAR + 1
    for query, visible in zip(_QUERIES, seen, strict=True):
        wanted = min(query + 1, window)
        if not bool(visible[:wanted].all()) or bool(visible[wanted:].any()):
            return None
    return Causal(None if full else window) if window else None


def _seen(rule: MaskRule, query: int) -> torch.Tensor:
    """Whether ``query`` sees the keys at its own place, one before it, and so on; then the 64 keys after it."""
    keys = torch.cat((torch.arange(query, -1, -1), torch.arange(query + 1, query + 65)))
    zero = torch.zeros((), dtype=torch.int64)
    return torch.as_tensor(rule(zero, zero, torch.full_like(keys, query), keys)).expand(len(keys))
