"""How far keys lie from queries, which ALiBi adds to the scores."""

from __future__ import annotations

import numpy as np
import torch

from pegboard_plugins.attention.context import StepContext


class Distances:
    """Key position minus query position of one tile, and the scores that they are added to."""

    def __init__(self, scores: torch.Tensor, positions: np.ndarray, low: int, context: StepContext) -> None:
        """``scores`` [N, kv heads, queries, group, keys]; queries at ``positions`` [N, queries], keys from ``low`` on."""
        keys = np.arange(low, low + scores.shape[-1])
        apart = (keys - positions[:, :, None])[:, None, :, None, :]
        self._scores = scores
        self._apart = torch.from_numpy(apart).to(context.device, context.dtype)

    def add(self, slopes: torch.Tensor) -> None:
        """``slopes`` [kv heads, 1, group, 1] float32."""
        self._scores.addcmul_(self._apart, slopes.to(self._apart.dtype))
