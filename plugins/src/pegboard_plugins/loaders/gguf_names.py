"""From GGUF's tensor names and row order to those of Hugging Face checkpoints. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_INNER = _INNER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA = frozenset({"gemma2", "gemma3"})
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_PERMUTED = re.compile(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)")

NOT_WEIGHTS = frozenset({"rope_freqs.weight"})
"""Tensors that repeat what the configuration says: ``gguf_config`` turns them into configuration."""


def hf_name(name: str, architecture: str) -> str:
    """The Hugging Face name of a GGUF tensor; the name itself if none is known, so that the model reports it as unexpected."""
    if match := _LAYER.fullmatch(name):
        inner = (_GEMMA_INNER if architecture in _GEMMA else _INNER).get(match[2])
        return f"model.layers.{match[1]}.{inner}.{match[3]}" if inner else name
    stem, _, kind = name.rpartition(".")
    return f"{_OUTER[stem]}.{kind}" if stem in _OUTER else name


def one_for_all(value: Any) -> Any:
    """A metadata value that may be given per layer: what all layers agree on, or else the value as it is."""
    return value[0] if isinstance(value, list) and value and len(set(value)) == 1 else value


def added_to(name: str, architecture: str) -> int:
    """What the converter has added to a tensor's values: Gemma's norms multiply with one plus their weight, and are stored so."""
    return 1 if architecture in _GEMMA and name.endswith("norm.weight") else 0


def row_order(name: str, rows: int, metadata: Mapping[str, Any]) -> npt.NDArray[np.int64] | None:
    """For each row in Hugging Face's order its row in the file; None if the orders are the same.

    The converter of llama.cpp stores queries and keys of the architecture "llama" (which Mistral's files have too) so that
    rotary pairs are neighbours; Hugging Face pairs each row with the one half a head later. Other architectures are not changed.
    """
    architecture = metadata.get("general.architecture")
    match = _PERMUTED.fullmatch(name)
    if architecture != "llama" or match is None:
        return None
    heads = one_for_all(metadata.get(f"{architecture}.attention.head_count"))
    if match[1] == "k":
        heads = one_for_all(metadata.get(f"{architecture}.attention.head_count_kv", heads))
    if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
        return None
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)
