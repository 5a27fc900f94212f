"""What a Gemma 2 or Gemma 3 config.json says, checked. Needs no torch.

Keys that are absent mean what they mean to transformers; published Gemma 3 files leave out most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard_plugins.layers.rope_parameters import RopeParameters, rope_parameters
from pegboard_plugins.models.decoder_config import (
    DecoderConfig,
    LayerNorms,
    head_counts,
    layer_types,
    norm_eps,
    refuse_other_activations,
    refuse_quantised,
    size,
    stated_architecture,
)

GEMMA2, GEMMA3, GEMMA3_IMAGES = "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"
ARCHITECTURES = (GEMMA2, GEMMA3, GEMMA3_IMAGES)
"""Of the one that also takes images, the text model alone."""

_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA2_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256_000, "max_position_embeddings": 8192, "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}  # fmt: skip
_GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208, "max_position_embeddings": 131_072, "sliding_window_pattern": 6,
}  # fmt: skip
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0

_NORMS = LayerNorms(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def gemma_config(stated: Mapping[str, Any], where: str) -> DecoderConfig:
    """Read the content of a config.json; ``where`` names the file in errors. Raises ``ValueError``."""
    architecture = stated_architecture(stated, ARCHITECTURES, where)
    if architecture == GEMMA3_IMAGES:
        stated = _text_part(stated, where)
        where = f"{where}: text_config"
    config = {**_DEFAULTS, **(_GEMMA2_DEFAULTS if architecture == GEMMA2 else _GEMMA3_DEFAULTS), **stated}
    num_heads, num_kv_heads = head_counts(config, where)
    hidden_size, head_size = size(config, "hidden_size", where), size(config, "head_dim", where)
    refuse_other_activations(config, "hidden_activation", ("gelu_pytorch_tanh",), where)
    refuse_quantised(config, where)
    _refuse_other_attention(config, architecture, where)
    kinds = layer_types(config, _alternating(config, where), where)
    ropes = _ropes(config, architecture, head_size, where)
    window = size(config, "sliding_window", where) if "sliding_attention" in kinds else None
    full = ropes["full_attention"]
    return DecoderConfig(
        architecture=architecture,
        vocab_size=size(config, "vocab_size", where),
        hidden_size=hidden_size,
        intermediate_size=size(config, "intermediate_size", where),
        num_layers=len(kinds),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_model_len=full.max_model_len if architecture == GEMMA2 else full.max_position_embeddings,
        rms_norm_eps=norm_eps(config, where),
        qkv_bias=bool(config.get("attention_bias", False)),
        o_bias=bool(config.get("attention_bias", False)),
        mlp_bias=False,
        qk_norm=architecture != GEMMA2,
        tie_word_embeddings=bool(config["tie_word_embeddings"]),
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        ropes=tuple(ropes[kind] for kind in kinds),
        attention_scale=_positive(config, "query_pre_attn_scalar", where) ** -0.5,
        activation="gelu_tanh",
        norms=_NORMS,
        unit_offset_norms=True,
        embedding_scale=hidden_size**0.5,
        attention_soft_cap=_cap(config, "attn_logit_softcapping", where),
        logit_soft_cap=_cap(config, "final_logit_softcapping", where),
    )


def _text_part(stated: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """``text_config``, with what is about all parts."""
    text = stated.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"{where}: text_config must be an object, not {text!r}")
    whole = {
        "tie_word_embeddings": stated.get("tie_word_embeddings", True),
        "quantization_config": stated.get("quantization_config"),
    }
    return {**text, **whole}


def _refuse_other_attention(config: Mapping[str, Any], architecture: str, where: str) -> None:
    if config.get("use_bidirectional_attention"):
        raise ValueError(
            f"{where}: use_bidirectional_attention is {config['use_bidirectional_attention']!r}: such a model embeds texts and "
            "generates none; only causal attention is supported"
        )
    if architecture != GEMMA2 and config.get("attn_logit_softcapping") is not None:
        raise ValueError(
            f"{where}: attn_logit_softcapping is {config['attn_logit_softcapping']!r}, which transformers' Gemma 3 ignores; "
            "set it to null to do the same"
        )


def _alternating(config: Mapping[str, Any], where: str) -> Sequence[str]:
    """Every n-th layer sees everything, the ones between slide."""
    period = size(config, "sliding_window_pattern", where)
    layers = size(config, "num_hidden_layers", where)
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]


def _ropes(config: Mapping[str, Any], architecture: str, head_size: int, where: str) -> Mapping[str, RopeParameters]:
    """By layer type. Gemma 2's layers turn alike. Of Gemma 3, ``rope_scaling`` and ``rope_theta`` are about the full layers and
    ``rope_local_base_freq`` about the sliding ones, or ``rope_parameters`` says all by layer type."""
    if architecture == GEMMA2:
        rope = rope_parameters(config, head_size, where)
        return {"full_attention": rope, "sliding_attention": rope}
    by_type = config.get("rope_parameters") or {}
    if not isinstance(by_type, Mapping) or not {*by_type} <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{where}: rope_parameters must hold an object for 'full_attention' and one for 'sliding_attention', not {by_type!r}"
        )
    full = {**(by_type.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
    sliding = dict(by_type.get("sliding_attention") or {})
    full.setdefault("rope_theta", config.get("rope_theta") or _GLOBAL_THETA)
    sliding.setdefault("rope_theta", config.get("rope_local_base_freq") or _LOCAL_THETA)
    return {
        "full_attention": rope_parameters({**config, "rope_parameters": full}, head_size, where),
        "sliding_attention": rope_parameters({**config, "rope_parameters": sliding}, head_size, where),
    }


def _cap(config: Mapping[str, Any], name: str, where: str) -> float | None:
    return None if config.get(name) is None else _positive(config, name, where)


def _positive(config: Mapping[str, Any], name: str, where: str) -> float:
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{where}: {name} must be a number, more than 0, not {value!r}")
    return float(value)
