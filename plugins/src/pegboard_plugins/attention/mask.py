"""What a query must not see, as numbers added to its scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pegboard_plugins.attention.context import StepContext

WRITTEN_OUT = 1 << 18
"""Numbers in the largest mask that is written out for every head of a group: fewer dimensions are added faster."""


@dataclass(frozen=True, slots=True)
class Mask:
    """``values`` (0 or minus infinity) is added to columns ``begin`` and up of the scores."""

    values: torch.Tensor
    """[N, queries * group, columns], or [N, queries, 1, columns] if that would be large."""
    begin: int

    def part_of(self, scores: torch.Tensor, by_head: bool = False) -> torch.Tensor:
        """View of ``scores`` [N * kv heads, queries * group, width] to which ``addend(by_head)`` is added."""
        rows, queries = self.values.shape[:2]
        batch, height, width = scores.shape
        dims = (height,) if self.values.dim() == 3 else (queries, height // queries)
        lead = (batch // rows, rows) if by_head else (rows, batch // rows)
        return scores.view(*lead, *dims, width)[..., self.begin :]

    def addend(self, by_head: bool = False) -> torch.Tensor:
        """``values`` with a dimension for the heads: before the rows if scores are sorted by head, else behind them."""
        return self.values.unsqueeze(0 if by_head else 1)


def causal_mask(positions: np.ndarray, low: int, high: int, context: StepContext) -> Mask | None:
    """Mask for queries at ``positions`` [N, queries] over keys ``low … high - 1``; None where nothing is hidden."""
    shape, window = context.shape, context.features.sliding_window
    before_window = window is not None and int(positions.max()) - window >= low
    # Whole vectors of columns from where the first key is hidden; all columns if the window hides some in front.
    begin = low if before_window else max((int(positions.min()) + 1) // shape.columns * shape.columns, low)
    if begin >= high:
        return None
    key = np.arange(begin, high)
    hidden = key > positions[:, :, None]
    if window is not None:
        hidden |= key <= positions[:, :, None] - window
    if not hidden.any():
        return None
    values = torch.zeros(hidden.shape, dtype=context.dtype, device=context.device)
    values.masked_fill_(torch.from_numpy(hidden).to(context.device), float("-inf"))
    if values.shape[1] > 1 and values.numel() * shape.group > WRITTEN_OUT:
        return Mask(values.unsqueeze(2), begin - low)
    return Mask(values.repeat_interleave(shape.group, 1) if values.shape[1] > 1 else values, begin - low)
