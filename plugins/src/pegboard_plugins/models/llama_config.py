"""What a Llama-family config.json says, checked and in one form. Needs no torch.

Keys that are absent mean what they mean to transformers, including defaults that differ between architectures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard_plugins.layers.rope_parameters import RopeParameters, rope_parameters

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes and switches of one checkpoint. ``windows``: sliding window of each layer, or None."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]
    rope: RopeParameters


def llama_config(config: Mapping[str, Any], where: str) -> LlamaConfig:
    """Read the content of a config.json; ``where`` names the file in errors. Raises ``ValueError``."""
    architecture = _architecture(config, where)
    hidden_size, num_heads = _size(config, "hidden_size", where), _size(config, "num_attention_heads", where)
    num_layers = _size(config, "num_hidden_layers", where)
    num_kv_heads = _size(config, "num_key_value_heads", where, default=num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"{where}: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})")
    head_size = _head_size(config, architecture, hidden_size, num_heads, where)
    _refuse_unsupported(config, where)
    attention_bias = bool(config.get("attention_bias", False)) and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    return LlamaConfig(
        architecture=architecture,
        vocab_size=_size(config, "vocab_size", where),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size", where),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rms_norm_eps=_eps(config, where),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        windows=_windows(config, architecture, num_layers, where),
        rope=rope_parameters(config, head_size, where),
    )


def _architecture(config: Mapping[str, Any], where: str) -> str:
    stated = config.get("architectures") or []
    for name in stated:
        if name in ARCHITECTURES:
            return str(name)
    raise ValueError(f"{where}: architectures is {stated!r}; this model implements {', '.join(ARCHITECTURES)}")


def _size(config: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{where} lacks {name!r}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}: {name} must be a whole number, at least 1, not {value!r}")
    return value


def _head_size(config: Mapping[str, Any], architecture: str, hidden_size: int, num_heads: int, where: str) -> int:
    if config.get("head_dim") is not None:
        return _size(config, "head_dim", where)
    if architecture == "Qwen3ForCausalLM" and "head_dim" not in config:
        return 128
    if hidden_size % num_heads:
        raise ValueError(
            f"{where}: hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads}) "
            "unless head_dim is stated"
        )
    return hidden_size // num_heads


def _eps(config: Mapping[str, Any], where: str) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{where}: rms_norm_eps must be a small positive number, not {value!r}")
    return float(value)


def _refuse_unsupported(config: Mapping[str, Any], where: str) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"{where}: hidden_act {activation!r} is not supported; this model implements 'silu'")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise ValueError(
            f"{where}: the checkpoint is quantised ({method}), which no installed part reads; "
            "use an unquantised checkpoint or a GGUF file"
        )


def _windows(config: Mapping[str, Any], architecture: str, num_layers: int, where: str) -> tuple[int | None, ...]:
    """Mistral slides in all layers; Qwen2 and Qwen3 only if ``use_sliding_window``, in those that ``layer_types`` names or else
    from ``max_window_layers`` on; Llama never."""
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        return (_window(config, where),) * num_layers
    window = _window(config, where) if config.get("use_sliding_window", False) else None
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        types = ["sliding_attention" if window is not None and i >= first else "full_attention" for i in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or not {*types} <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{where}: layer_types must name 'full_attention' or 'sliding_attention' for each of {num_layers} layers, "
            f"not {types!r}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _window(config: Mapping[str, Any], where: str) -> int | None:
    if "sliding_window" in config and config["sliding_window"] is None:
        return None
    return _size(config, "sliding_window", where, default=4096)
