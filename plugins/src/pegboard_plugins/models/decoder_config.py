"""What a decoder's configuration says, checked and in one form, and the checks that families share. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pegboard_plugins.layers.activations import Activation
from pegboard_plugins.layers.rope_parameters import RopeParameters

LAYER_TYPES = ("full_attention", "sliding_attention")


class LayerNorms(NamedTuple):
    """Names of a layer's norms within it. Those *after* apply to what attention or the MLP adds to the residual stream."""

    before_attention: str = "input_layernorm"
    before_mlp: str = "post_attention_layernorm"
    after_attention: str | None = None
    after_mlp: str | None = None

    @property
    def names(self) -> Sequence[str]:
        return [name for name in self if name is not None]


NORMS_BEFORE = LayerNorms()


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and switches of one checkpoint. ``windows``: sliding window of each layer, or None; ``ropes``: its rotary embedding.

    ``attention_scale``: what scores are multiplied with. ``attention_soft_cap`` and ``logit_soft_cap``: ``cap * tanh(x / cap)``
    of the scores and of the logits. ``unit_offset_norms``: norms multiply with one plus their weight. ``embedding_scale``: what
    embeddings are multiplied with, rounded to the model's dtype first.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    rms_norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]
    ropes: tuple[RopeParameters, ...]
    attention_scale: float
    activation: Activation = "silu"
    norms: LayerNorms = NORMS_BEFORE
    unit_offset_norms: bool = False
    embedding_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None


def stated_architecture(config: Mapping[str, Any], implemented: Sequence[str], where: str) -> str:
    stated = config.get("architectures") or []
    for name in stated:
        if name in implemented:
            return str(name)
    raise ValueError(f"{where}: architectures is {stated!r}; this model implements {', '.join(implemented)}")


def size(config: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{where} lacks {name!r}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}: {name} must be a whole number, at least 1, not {value!r}")
    return value


def head_counts(config: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Of queries, and of keys and values."""
    num_heads = size(config, "num_attention_heads", where)
    num_kv_heads = size(config, "num_key_value_heads", where, default=num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"{where}: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})")
    return num_heads, num_kv_heads


def norm_eps(config: Mapping[str, Any], where: str) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{where}: rms_norm_eps must be a small positive number, not {value!r}")
    return float(value)


def refuse_other_activations(config: Mapping[str, Any], name: str, accepted: Sequence[str], where: str) -> None:
    """``name``: the key. ``accepted``: names of the one function that the model implements; the first is what absence means."""
    activation = config.get(name, accepted[0])
    if activation not in accepted:
        raise ValueError(f"{where}: {name} {activation!r} is not supported; this model implements {accepted[0]!r}")


def refuse_quantised(config: Mapping[str, Any], where: str) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise ValueError(
            f"{where}: the checkpoint is quantised ({method}), which no installed part reads; "
            "use an unquantised checkpoint or a GGUF file"
        )


def layer_types(config: Mapping[str, Any], default: Sequence[str], where: str) -> Sequence[str]:
    """ "full_attention" or "sliding_attention" for each layer; ``default`` where the configuration does not say."""
    types = config.get("layer_types")
    if types is None:
        return default
    if not isinstance(types, list) or len(types) != len(default) or not {*types} <= {*LAYER_TYPES}:
        raise ValueError(
            f"{where}: layer_types must name 'full_attention' or 'sliding_attention' for each of {len(default)} layers, "
            f"not {types!r}"
        )
    return types
