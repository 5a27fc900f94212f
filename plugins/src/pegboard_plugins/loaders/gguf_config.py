"""A model configuration from a GGUF's metadata, with the keys of a Hugging Face config.json. Imports no torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from pegboard.contracts.weight_loader import WeightsError
from pegboard_plugins.loaders.gguf_gemma import gemma2_config, gemma3_config
from pegboard_plugins.loaders.gguf_keys import GGUFKeys
from pegboard_plugins.loaders.gguf_metadata import GGUFFile

ARCHITECTURES = {
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
"""``general.architecture`` to the class name and ``model_type`` of Hugging Face. Files of Mistral and SmolLM say "llama". Those
of Gemma 3 hold the text model; images are in another file."""

_OWN_KEYS = {"gemma2": gemma2_config, "gemma3": gemma3_config}
"""What an architecture has beside the common keys, or instead of them."""

_LLAMA3_CONTEXT = 8192
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """What config.json would say. ``dtype`` is None for quantised files: the platform's preferred one.

    Raises ``WeightsError`` naming the file and the missing or unusable key.
    """
    architecture = file.architecture
    if architecture not in ARCHITECTURES:
        raise WeightsError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported (supported: {', '.join(sorted(ARCHITECTURES))}); "
            "a plugin can resolve and load other ones"
        )
    keys = GGUFKeys(file, architecture)
    if int(keys.get("expert_count", 0)) > 0:
        raise WeightsError(f"{file.path}: a mixture of experts ({architecture} with expert_count), which is not supported")
    name, model_type = ARCHITECTURES[architecture]
    heads = keys.count("attention.head_count")
    hidden = keys.count("embedding_length")
    head_dim = keys.count("attention.key_length", hidden // heads)
    if (value_length := keys.count("attention.value_length", head_dim)) != head_dim:
        raise WeightsError(f"{file.path}: keys of {head_dim} and values of {value_length} numbers per head are not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise WeightsError(f"{file.path}: the tensor token_embd.weight is missing")
    config = {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": float(keys.need("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "dtype": _dtype(file),
        **_rope(file, keys, head_dim),
    }
    if architecture in _OWN_KEYS:
        config |= _OWN_KEYS[architecture](keys, config)
    for key in ("bos", "eos", "padding"):
        config[f"{'pad' if key == 'padding' else key}_token_id"] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return config


def gguf_generation_config(file: GGUFFile) -> dict[str, Any]:
    """What generation_config.json would say: every id that ends an answer (end of text, of turn, of message)."""
    found = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(token for token in found if token is not None))
    return {"eos_token_id": ends} if ends else {}


def _dtype(file: GGUFFile) -> str | None:
    """The float type of the matrices; norms are kept in float32 in files of any type."""
    kinds = {info.type for info in file.tensors.values() if len(info.shape) > 1}
    names = {
        GGMLQuantizationType.F32: "float32",
        GGMLQuantizationType.F16: "float16",
        GGMLQuantizationType.BF16: "bfloat16",
    }
    if not kinds or not kinds <= set(names):
        return None
    smaller = kinds - {GGMLQuantizationType.F32}
    return names[smaller.pop()] if len(smaller) == 1 else "float32"


def _rope(file: GGUFFile, keys: GGUFKeys, head_dim: int) -> dict[str, Any]:
    base = float(keys.get("rope.freq_base", 10000.0))
    config: dict[str, Any] = {"rope_theta": base}
    rotary = keys.count("rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise WeightsError(f"{file.path}: rope.dimension_count is {rotary} of {head_dim} per head; partial rope is not supported")
    kind = keys.get("rope.scaling.type")
    if kind is None and keys.get("rope.scale_linear", 1.0) != 1.0:  # how files of 2023 say it
        kind = "linear"
    if kind not in (None, "none"):
        config["rope_scaling"] = _scaling(keys, kind)
    elif "rope_freqs.weight" in file.tensors:
        config |= _llama3_scaling(file, keys, base, head_dim)
    return config


def _scaling(keys: GGUFKeys, kind: str) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": float(keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0))),
    }
    for key, name in (
        ("rope.scaling.original_context_length", "original_max_position_embeddings"),
        ("rope.scaling.attn_factor", "attention_factor"),
        ("rope.scaling.yarn_beta_fast", "beta_fast"),
        ("rope.scaling.yarn_beta_slow", "beta_slow"),
    ):
        if (value := keys.get(key)) is not None:
            scaling[name] = value
    return scaling


def _llama3_scaling(file: GGUFFile, keys: GGUFKeys, base: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's rope scaling. GGUF keeps the resulting factor of each frequency, not the rule; it is found again and verified."""
    info = file.tensors["rope_freqs.weight"]
    if info.type is not GGMLQuantizationType.F32 or info.shape != (head_dim // 2,):
        raise WeightsError(f"{file.path}: rope_freqs.weight is {info.type.name} {info.shape}, expected F32 ({head_dim // 2},)")
    with open(file.path, "rb") as stream:
        stream.seek(info.offset)
        factors = np.frombuffer(stream.read(info.nbytes), np.float32)
    if np.all(factors == 1):
        return {}
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": int(keys.get("rope.scaling.original_context_length", _LLAMA3_CONTEXT)),
    }
    if not np.allclose(llama3_factors(base, head_dim, scaling), factors, rtol=1e-4):
        raise WeightsError(f"{file.path}: rope_freqs.weight does not follow Llama 3's rule; its rope scaling is not supported")
    return {"rope_scaling": scaling}


def llama3_factors(base: float, rotary: int, scaling: dict[str, Any]) -> npt.NDArray[np.float64]:
    """What each rotary frequency is divided by: 1 for short waves, ``factor`` for long ones, blended between."""
    frequency = base ** (-np.arange(0, rotary, 2) / rotary)
    periods = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    smooth = np.clip((periods - low) / (high - low), 0, 1)
    blended: npt.NDArray[np.float64] = 1 / ((1 - smooth) / factor + smooth)
    return blended
