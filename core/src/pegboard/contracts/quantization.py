"""Quantization: low-bit weights and the linear layers that use them."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

API: Final = 1


class LinearMethod(abc.ABC):
    """How a linear layer stores and applies its weight. Invariant: ``apply`` equals ``x @ weight.T + bias`` within the
    method's stated tolerance."""

    @abc.abstractmethod
    def process_weight(self, weight: torch.Tensor) -> Any:
        """Turn the loaded [out, in] weight into its run-time form; the original may be freed."""

    @abc.abstractmethod
    def apply(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor: ...


class Quantization(abc.ABC):
    """Constructed with the checkpoint's quantization section. Picks a method per layer name."""

    @classmethod
    @abc.abstractmethod
    def claims(cls, checkpoint_config: Mapping[str, Any]) -> bool:
        """Whether a checkpoint is of this kind."""

    @abc.abstractmethod
    def linear_method(self, layer_name: str) -> LinearMethod | None:
        """None: leave this layer unquantised."""
