"""Tiny GGUF files, written from a checkpoint folder the way llama.cpp's converter writes real ones.

Needs the packages gguf, safetensors and torch, all imported when called.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Token types of GGUF."""

_ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3_text": "gemma3",
}  # fmt: skip
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def write_gguf(
    folder: str | Path,
    path: str | Path,
    file_type: str = "F32",
    *,
    tokenizer: bool = True,
    metadata: Mapping[str, Any] | None = None,
    edit: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """Write the checkpoint in ``folder`` to ``path`` as GGUF and return ``path``.

    ``file_type``: the type of the matrices (a name of the gguf package, such as F32, F16, BF16, Q8_0, Q4_0); vectors stay F32.
    ``tokenizer``: include the folder's byte-level BPE and chat template. ``metadata`` adds or replaces keys (``...`` leaves one
    out). ``edit`` may change the float32 arrays, by GGUF name, before they are written.
    """
    folder, path = Path(folder), Path(path)
    config = json.loads((folder / "config.json").read_text())
    values = _model_metadata(config)
    if tokenizer:
        values.update(_tokenizer_metadata(folder, config["vocab_size"]))
    values.update(metadata or {})
    tensors = _tensors(folder, config)
    if edit is not None:
        edit(tensors)
    _write(path, file_type, {key: value for key, value in values.items() if value is not ...}, tensors)
    return path


def _write(path: Path, file_type: str, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    import gguf

    values = dict(metadata)
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", ""))
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, _value_type(value))
    matrices = gguf.GGMLQuantizationType[file_type]
    for name, data in tensors.items():
        kind = matrices if data.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _value_type(value: Any) -> Any:
    from gguf import GGUFValueType

    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
    return kinds[type(value)]


def _model_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    architecture = _ARCHITECTURES[config["model_type"]]
    sizes = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float((config.get("rope_parameters") or config)["rope_theta"]),
        "rope.dimension_count": config["head_dim"],
        "vocab_size": config["vocab_size"],
    }
    if architecture in ("gemma2", "gemma3"):
        sizes |= _gemma_metadata(config)
    return {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in sizes.items()}}


def _gemma_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": config.get("sliding_window_pattern", 2),
        "attention.scale": config["query_pre_attn_scalar"] ** -0.5,
    }
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config[name] is not None:
            found[name] = float(config[name])
    return found


def _tokenizer_metadata(folder: Path, vocab_size: int) -> dict[str, Any]:
    spec = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocab: dict[str, int] = dict(spec["model"]["vocab"])
    special = {}
    for token in spec["added_tokens"]:
        vocab[token["content"]] = token["id"]
        special[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    by_id = {number: token for token, number in vocab.items()}
    count = max(vocab_size, max(by_id) + 1)
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [by_id.get(i, f"[PAD{i}]") for i in range(count)],
        "tokenizer.ggml.token_type": [special.get(i, NORMAL) if i in by_id else UNUSED for i in range(count)],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": bool(settings.get("add_bos_token")),
    }
    for key in ("bos", "eos"):
        if (token := settings.get(f"{key}_token")) is not None:
            found[f"tokenizer.ggml.{key}_token_id"] = vocab[token]
    if settings.get("chat_template"):
        found["tokenizer.chat_template"] = settings["chat_template"]
    return found


def _tensors(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The folder's tensors by GGUF name, float32. Those of llama's queries and keys with rotary pairs as neighbours, those of
    Gemma's norms with one added."""
    from safetensors.torch import load_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    architecture = _ARCHITECTURES[config["model_type"]]
    permuted, gemma = architecture == "llama", architecture in ("gemma2", "gemma3")
    names = _NAMES | (_GEMMA_NAMES if gemma else {})
    found = {}
    for part in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(part).items():
            stem, _, kind = name.rpartition(".")
            prefix = ""
            if stem.startswith("model.layers."):
                _, _, layer, stem = stem.split(".", 3)
                prefix = f"blk.{layer}."
            short = names[stem]
            data = tensor.float().numpy()
            if permuted and short in heads:
                pairs = data.reshape(heads[short], 2, -1, *data.shape[1:])
                data = pairs.swapaxes(1, 2).reshape(data.shape)
            found[f"{prefix}{short}.{kind}"] = data + 1 if gemma and short.endswith("norm") else data
    return found
