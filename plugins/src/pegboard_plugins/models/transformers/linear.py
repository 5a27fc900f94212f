"""transformers' linear layers, computed by the engine's linear method, which is much faster on a processor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from pegboard_plugins.layers.linear_methods import FusedLinearMethod, PlainLinearMethod, linear_method


class EngineLinear(torch.nn.Linear):
    """``weight`` is plain until ``finish`` turns it into the method's form."""

    method: FusedLinearMethod | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.product(input, self.bias)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, self.weight, bias) if self.method is None else self.method.apply(x, self.weight, bias)

    def finish(self, method: FusedLinearMethod) -> None:
        weight = self._parameters.pop("weight")
        assert weight is not None
        self.__dict__["weight"] = method.process_weight(weight.data)
        self.method = method


def use_engine_linear(model: PreTrainedModel) -> None:
    """In the place of plain linear layers. Classes derived from them stay: they do more."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = EngineLinear


def finish_linear(modules: Iterable[torch.nn.Module], dtype: torch.dtype, device: torch.device) -> None:
    """Once the weights are loaded. ``modules``: those whose weights are used by their own forward alone."""
    method = linear_method(device, dtype)
    if isinstance(method, PlainLinearMethod):
        return
    for module in modules:
        if isinstance(module, EngineLinear) and module.weight.dtype == dtype:
            module.finish(method)
