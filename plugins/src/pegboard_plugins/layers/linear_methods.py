"""How linear layers without quantisation store and apply their weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pegboard.contracts.quantization import LinearMethod
from pegboard_plugins.layers.activations import Activation

_ONEDNN_ACTIVATIONS: dict[Activation, tuple[str, str]] = {"silu": ("swish", ""), "gelu_tanh": ("gelu", "tanh")}


class FusedLinearMethod(LinearMethod):
    """A linear method that can also do what follows the product. The defaults do it in separate operations."""

    def apply_add(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias + residual``, in a new tensor."""
        return self.apply(x, weight, bias).add_(residual)

    def process_gate_up(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run-time form of a [2 * inner, in] weight, gate rows first."""
        return (self.process_weight(weight),)

    def apply_gate_up(
        self, x: torch.Tensor, weights: tuple[torch.Tensor, ...], bias: torch.Tensor | None, activation: Activation
    ) -> torch.Tensor:
        """``activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias)``."""
        gate, up = self.apply(x, weights[0], bias).chunk(2, -1)
        activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        return activated.mul_(up)


class PlainLinearMethod(FusedLinearMethod):
    """The weight as it is, through ``F.linear``: any device, any dtype."""

    def process_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def apply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, weight, bias)


class PackedLinearMethod(FusedLinearMethod):
    """The weight in oneDNN's blocked layout, with what follows fused into the product. CPU, float32 and bfloat16.

    Measured for the 30 layers of a 135 M model (hidden 576, inner 1536) on two AVX512 cores, ms:

    ===============================  =====  =====  =====
    bfloat16, rows                       1     32    512
    ===============================  =====  =====  =====
    F.linear, all projections          9.3   15.9    124
    packed, all projections            6.2   10.9    121
    packed gate_up, then silu * up    2.80   10.1     63
    packed gate (silu), up (mul)      2.76    6.3     62
    residual added by the product     +0.1   +0.2   +0.5
    residual added afterwards         0.06   0.22   1.52
    ===============================  =====  =====  =====

    So gate and up are packed as two weights. In float32 packing is worth more: ``F.linear`` takes 2.3 times as long there. The
    number of rows that the layout is made for (1, 32, 256 or 512) made no difference beyond noise.
    """

    ROWS_HINT = 32

    def process_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self.ROWS_HINT)

    def apply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    def apply_add(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, bias, "add")

    def process_gate_up(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = weight.chunk(2)
        return self.process_weight(gate), self.process_weight(up)

    def apply_gate_up(
        self, x: torch.Tensor, weights: tuple[torch.Tensor, ...], bias: torch.Tensor | None, activation: Activation
    ) -> torch.Tensor:
        gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)
        function, variant = _ONEDNN_ACTIVATIONS[activation]
        gate = torch.ops.mkldnn._linear_pointwise(x, weights[0], gate_bias, function, [], variant)
        return torch.ops.mkldnn._linear_pointwise.binary(x, gate, weights[1], up_bias, "mul")


def linear_method(device: torch.device, dtype: torch.dtype, compiled: bool = False) -> FusedLinearMethod:
    """The fastest of the methods above that works on this device and dtype. float16 on a CPU stays plain: oneDNN packs it only
    on processors with float16 arithmetic. ``compiled`` code takes plain weights: torch's compiler packs constants only."""
    if compiled:
        return PlainLinearMethod()
    if device.type == "cpu" and torch.backends.mkldnn.is_available():
        if dtype == torch.float32:
            return PackedLinearMethod()
        if dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return PackedLinearMethod()
    return PlainLinearMethod()
