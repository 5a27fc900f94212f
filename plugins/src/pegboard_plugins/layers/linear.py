"""Linear layers: shapes, loading, and the method that stores and applies the weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pegboard_plugins.layers.activations import Activation
from pegboard_plugins.layers.linear_methods import FusedLinearMethod


class Linear:
    """``x @ weight.T + bias``; the weight is [out, in].

    ``load_weight`` hands the weight over: the method turns it into its run-time form at once, and the plain one is freed.
    """

    def __init__(self, name: str, method: FusedLinearMethod) -> None:
        self.name, self.method = name, method
        self.weight: torch.Tensor
        self.bias: torch.Tensor | None = None

    def load_weight(self, weight: torch.Tensor) -> None:
        self.weight = self.method.process_weight(weight)

    def load_bias(self, bias: torch.Tensor) -> None:
        self.bias = bias

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Run-time tensors by name."""
        yield f"{self.name}.weight", self.weight
        if self.bias is not None:
            yield f"{self.name}.bias", self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(x, self.weight, self.bias)

    def forward_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The product plus ``residual``, in a new tensor."""
        return self.method.apply_add(x, self.weight, self.bias, residual)


class GateUpLinear:
    """The gated first half of an MLP: ``activation(x @ gate.T) * (x @ up.T)``, with biases if it has them.

    Loaded as one weight [2 * inner, in], gate rows first.
    """

    def __init__(self, name: str, method: FusedLinearMethod, activation: Activation) -> None:
        self.name, self.method, self.activation = name, method, activation
        self.weights: tuple[torch.Tensor, ...]
        self.bias: torch.Tensor | None = None

    def load_weight(self, weight: torch.Tensor) -> None:
        self.weights = self.method.process_gate_up(weight)

    def load_bias(self, bias: torch.Tensor) -> None:
        self.bias = bias

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Run-time tensors by name; a method may keep gate and up apart."""
        for i, weight in enumerate(self.weights):
            yield f"{self.name}.weight" + (f".{i}" if len(self.weights) > 1 else ""), weight
        if self.bias is not None:
            yield f"{self.name}.bias", self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply_gate_up(x, self.weights, self.bias, self.activation)
