"""One layer of a decoder: attention and a gated MLP, each added to the residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pegboard.contracts.attention import AttentionLayer
from pegboard.contracts.model import ForwardContext
from pegboard_plugins.layers.attention import attend
from pegboard_plugins.layers.linear import GateUpLinear, Linear
from pegboard_plugins.layers.norm import QueryKeyNorm, RMSNorm
from pegboard_plugins.layers.rotary import CosSin, RotaryEmbedding
from pegboard_plugins.models.decoder_config import DecoderConfig
from pegboard_plugins.models.decoder_parts import DecoderParts
from pegboard_plugins.models.decoder_tensors import layer_parameters
from pegboard_plugins.models.weights import ParameterReader


class DecoderLayer:
    """Both are normalised before and, in some families, after. Without a norm after it the last product of each adds the
    residual itself."""

    def __init__(self, config: DecoderConfig, index: int, rotary: RotaryEmbedding, parts: DecoderParts) -> None:
        self.prefix = f"model.layers.{index}"
        self.rotary = rotary
        self.num_heads, self.num_kv_heads, self.head_size = parts.num_heads, parts.num_kv_heads, config.head_size
        self.qk_width = (self.num_heads + self.num_kv_heads) * config.head_size
        self.attention = AttentionLayer(
            name=f"{self.prefix}.self_attn",
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=config.head_size,
            scale=config.attention_scale,
            sliding_window=config.windows[index],
            logits_soft_cap=config.attention_soft_cap,
        )
        attention, mlp = f"{self.prefix}.self_attn", f"{self.prefix}.mlp"
        self.norms = {name: parts.norm(f"{self.prefix}.{name}") for name in config.norms.names}
        self.before_attention, self.before_mlp = self.norms[config.norms.before_attention], self.norms[config.norms.before_mlp]
        self.after_attention = self._after(config.norms.after_attention)
        self.after_mlp = self._after(config.norms.after_mlp)
        self.qkv = Linear(f"{attention}.qkv_proj", parts.method)
        self.qk_norm = parts.qk_norm(f"{attention}.qk_norm") if config.qk_norm else None
        self.o = parts.second_linear(f"{attention}.o_proj")
        self.gate_up = GateUpLinear(f"{mlp}.gate_up_proj", parts.method, config.activation)
        self.down = parts.second_linear(f"{mlp}.down_proj")

    def _after(self, name: str | None) -> RMSNorm | None:
        return None if name is None else self.norms[name]

    def load(self, reader: ParameterReader, config: DecoderConfig, parts: DecoderParts) -> None:
        """Read this rank's part of the parameters and hand each to its module."""
        read = {p.name.removeprefix(f"{self.prefix}."): p for p in layer_parameters(config, self.prefix, parts.share)}
        for name, norm in self.norms.items():
            norm.load(reader.read(read[f"{name}.weight"]))
        if self.qk_norm is not None:
            self.qk_norm.load(reader.read(read["self_attn.q_norm.weight"]), reader.read(read["self_attn.k_norm.weight"]))
        linears: dict[str, Linear | GateUpLinear] = {
            "self_attn.qkv_proj": self.qkv,
            "self_attn.o_proj": self.o,
            "mlp.gate_up_proj": self.gate_up,
            "mlp.down_proj": self.down,
        }
        for name, linear in linears.items():
            if f"{name}.bias" in read:
                linear.load_bias(reader.read(read[f"{name}.bias"]))
            linear.load_weight(reader.read(read[f"{name}.weight"]))

    def modules(self) -> Sequence[Any]:
        found: list[QueryKeyNorm | RMSNorm | Linear | GateUpLinear | None]
        found = [*self.norms.values(), self.qkv, self.qk_norm, self.o, self.gate_up, self.down]
        return [module for module in found if module is not None]

    def forward(self, hidden: torch.Tensor, cos_sin: CosSin, context: ForwardContext, out: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] to the same. ``out`` [T, num_heads, head_size] is scratch space that all layers share."""
        tokens = hidden.shape[0]
        qkv = self.qkv.forward(self.before_attention.forward(hidden))
        heads = qkv[:, : self.qk_width].view(tokens, -1, self.head_size)
        if self.qk_norm is not None:
            heads = self.qk_norm.forward(heads)
        heads = self.rotary.rotate(heads, cos_sin)
        value = qkv[:, self.qk_width :].view(tokens, self.num_kv_heads, self.head_size)
        attend(self.attention, heads[:, : self.num_heads], heads[:, self.num_heads :], value, context, out)
        hidden = _added(self.o, out.view(tokens, self.num_heads * self.head_size), self.after_attention, hidden)
        inner = self.gate_up.forward(self.before_mlp.forward(hidden))
        return _added(self.down, inner, self.after_mlp, hidden)


def _added(linear: Linear, x: torch.Tensor, norm: RMSNorm | None, residual: torch.Tensor) -> torch.Tensor:
    """The product, normalised if there is a norm, plus the residual, in a new tensor."""
    if norm is None:
        return linear.forward_add(x, residual)
    return norm.forward(linear.forward(x)).add_(residual)
