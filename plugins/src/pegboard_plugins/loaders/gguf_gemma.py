"""What GGUF says of Gemma 2 and Gemma 3 beside the common keys. What a file leaves out is as llama.cpp has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.contracts.weight_loader import WeightsError
from pegboard_plugins.loaders.gguf_keys import GGUFKeys

_LARGEST = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27 B models, the only ones whose scores are not scaled by the size of a head."""


def gemma2_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """``config``: what the common keys have given. Raises ``WeightsError``."""
    return {
        **_common(keys, config, window=4096, period=2),
        "attn_logit_softcapping": float(keys.get("attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": float(keys.get("final_logit_softcapping", 30.0)),
    }


def gemma3_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """As ``gemma2_config``. Scaling of rotary embeddings is about the full layers alone."""
    cap = keys.get("final_logit_softcapping")
    return {
        **_common(keys, config, window=None, period=6),
        "rope_local_base_freq": float(keys.get("rope.freq_base_swa", 10000.0)),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": float(cap) if cap else None,
    }


def _common(keys: GGUFKeys, config: Mapping[str, Any], window: int | None, period: int) -> dict[str, Any]:
    """``window``: where the file states none; None: all layers are then full. ``period``: every so many layers one is full."""
    if keys.get("attention.sliding_window", window):
        window = keys.count("attention.sliding_window", window)
    sliding = _sliding(keys, config["num_hidden_layers"], period) if window else [False] * config["num_hidden_layers"]
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window,
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
        "query_pre_attn_scalar": _query_scalar(keys, config),
    }


def _sliding(keys: GGUFKeys, layers: int, period: int) -> Sequence[bool]:
    """Stated as a period or for each layer."""
    stated = keys.get("attention.sliding_window_pattern", period)
    if isinstance(stated, list):
        if len(stated) < layers:
            raise WeightsError(keys.told("attention.sliding_window_pattern", f"has {len(stated)} items for {layers} layers"))
        return [bool(item) for item in stated[:layers]]
    period = keys.count("attention.sliding_window_pattern", period)
    return [(i + 1) % period != 0 for i in range(layers)]


def _query_scalar(keys: GGUFKeys, config: Mapping[str, Any]) -> float:
    """Scores are multiplied with this to the power of -1/2. A whole number in all published models."""
    scalar = float(config["head_dim"])
    if scale := keys.get("attention.scale"):
        scalar = float(scale) ** -2
    elif config["num_hidden_layers"] == _LARGEST[keys.architecture]:
        scalar = config["hidden_size"] / config["num_attention_heads"]
    whole = round(scalar)
    return whole if abs(scalar - whole) < 1e-4 * scalar else scalar
