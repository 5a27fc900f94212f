"""What every part of one step's plan is built from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pegboard_plugins.attention.constants import Features
from pegboard_plugins.attention.shape import Shape
from pegboard_plugins.attention.workspace import Workspace


@dataclass(frozen=True, slots=True)
class StepContext:
    """One step on the layers of a group that have the same features."""

    block_table: torch.Tensor
    """[B, max_blocks] int32."""
    shape: Shape
    workspace: Workspace
    dtype: torch.dtype
    """The type in which attention computes."""
    cache_dtype: torch.dtype
    features: Features

    @property
    def device(self) -> torch.device:
        return self.block_table.device

    @property
    def sink_columns(self) -> int:
        """Columns behind the scores for a sink."""
        return self.shape.columns if self.features.sinks else 0

    def buffer(self, name: str, *dims: int) -> torch.Tensor:
        """Workspace in the type in which attention computes."""
        return self.workspace.view(name, self.dtype, *dims)
