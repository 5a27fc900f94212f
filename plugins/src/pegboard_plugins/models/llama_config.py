"""What a Llama-family config.json says, checked. Needs no torch.

Keys that are absent mean what they mean to transformers, including defaults that differ between architectures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard_plugins.layers.rope_parameters import rope_parameters
from pegboard_plugins.models.decoder_config import (
    DecoderConfig,
    head_counts,
    layer_types,
    norm_eps,
    refuse_other_activations,
    refuse_quantised,
    size,
    stated_architecture,
)

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def llama_config(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Read the content of a config.json; ``where`` names the file in errors. Raises ``ValueError``."""
    architecture = stated_architecture(config, ARCHITECTURES, where)
    hidden_size = size(config, "hidden_size", where)
    num_heads, num_kv_heads = head_counts(config, where)
    num_layers = size(config, "num_hidden_layers", where)
    head_size = _head_size(config, architecture, hidden_size, num_heads, where)
    refuse_other_activations(config, "hidden_act", ("silu", "swish"), where)
    refuse_quantised(config, where)
    attention_bias = bool(config.get("attention_bias", False)) and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    rope = rope_parameters(config, head_size, where)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=size(config, "vocab_size", where),
        hidden_size=hidden_size,
        intermediate_size=size(config, "intermediate_size", where),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_model_len=rope.max_model_len,
        rms_norm_eps=norm_eps(config, where),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        windows=_windows(config, architecture, num_layers, where),
        ropes=(rope,) * num_layers,
        attention_scale=head_size**-0.5,
    )


def _head_size(config: Mapping[str, Any], architecture: str, hidden_size: int, num_heads: int, where: str) -> int:
    if config.get("head_dim") is not None:
        return size(config, "head_dim", where)
    if architecture == "Qwen3ForCausalLM" and "head_dim" not in config:
        return 128
    if hidden_size % num_heads:
        raise ValueError(
            f"{where}: hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads}) "
            "unless head_dim is stated"
        )
    return hidden_size // num_heads


def _windows(config: Mapping[str, Any], architecture: str, num_layers: int, where: str) -> tuple[int | None, ...]:
    """Mistral slides in all layers; Qwen2 and Qwen3 only if ``use_sliding_window``, in those that ``layer_types`` names or else
    from ``max_window_layers`` on; Llama never."""
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        return (_window(config, where),) * num_layers
    window = _window(config, where) if config.get("use_sliding_window", False) else None
    first = config.get("max_window_layers", 28)
    default = ["sliding_attention" if window is not None and i >= first else "full_attention" for i in range(num_layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types(config, default, where))


def _window(config: Mapping[str, Any], where: str) -> int | None:
    if "sliding_window" in config and config["sliding_window"] is None:
        return None
    return size(config, "sliding_window", where, default=4096)
