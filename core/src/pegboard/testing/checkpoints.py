"""Tiny random checkpoints: folders that this engine, transformers and other tools load alike.

The weights are seeded normal numbers, scaled so that a greedy choice is usually clear (the best logit leads the second by
more than 0.05 in about nineteen of twenty positions) and depends on the whole context. Written with torch and safetensors,
both imported when called; ``config.json`` states every size that a reader would otherwise default.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard.testing.tiny_tokenizer import BOS, EOS, write_tokenizer

if TYPE_CHECKING:
    import torch

LOGIT_STD = 4.0
"""Standard deviation of the logits of one position. Their largest two of 1000 then differ by about 1 on average."""

_GEMMA = {
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "sliding_window": 8,
    "query_pre_attn_scalar": 24,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", "attention_bias": False, "mlp_bias": False},
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": None},
    "Qwen2ForCausalLM": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": None, "max_window_layers": 0},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "attention_bias": False, "use_sliding_window": False, "sliding_window": None,
                         "max_window_layers": 0},
    "Gemma2ForCausalLM": {"model_type": "gemma2", **_GEMMA, "attn_logit_softcapping": 10.0, "final_logit_softcapping": 15.0},
    "Gemma3ForCausalLM": {"model_type": "gemma3_text", **_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None,
                          "sliding_window_pattern": 2, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0},
}  # fmt: skip
"""What is not of the common keys of ``make_checkpoint``, or replaces them."""


def make_checkpoint(
    folder: str | Path,
    architecture: str = "LlamaForCausalLM",
    *,
    seed: int = 0,
    dtype: str = "float32",
    vocab_size: int = 1000,
    hidden_size: int = 64,
    intermediate_size: int | None = None,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    max_position_embeddings: int = 512,
    tie_word_embeddings: bool = False,
    tokenizer: bool = True,
    tokenizer_size: int | None = None,
    bos: bool = False,
    shards: int = 1,
    config_overrides: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    edit: Callable[[dict[str, torch.Tensor]], None] | None = None,
) -> Path:
    """Write a checkpoint into ``folder`` (created if needed) and return its path.

    ``dtype`` is that of the tensors and of the config. ``tokenizer``: also write a byte-level BPE ``tokenizer.json`` of
    ``tokenizer_size`` (default: ``vocab_size``) tokens with a chat template, which starts prompts with BOS if ``bos``.
    ``shards``: files that the tensors are spread over, with an index if more than one. ``config_overrides`` replaces keys of
    config.json (a value of ``...`` removes one), and the tensors follow from the result. ``generation_config``: content of
    generation_config.json, by default the EOS id. ``edit`` may change the tensors by name before they are written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size or 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim or hidden_size // num_heads,
        "max_position_embeddings": max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": dtype,
        **ARCHITECTURES[architecture],
    }
    config.update(config_overrides or {})
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if generation_config is None:
        generation_config = {"bos_token_id": BOS, "eos_token_id": EOS}
    (folder / "generation_config.json").write_text(json.dumps(dict(generation_config), indent=2))
    if tokenizer:
        write_tokenizer(folder, size=tokenizer_size or vocab_size, bos=bos)
    tensors = random_tensors(config, seed=seed, dtype=dtype)
    if edit is not None:
        edit(tensors)
    write_shards(folder, tensors, shards)
    return folder


def random_tensors(config: Mapping[str, Any], *, seed: int = 0, dtype: str = "float32") -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint with this config.json: name to seeded random values."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape, mean, std in _parameters(config):
        values = torch.empty(shape).normal_(mean, std, generator=generator)
        found[name] = values.to(getattr(torch, dtype))
    return found


def write_shards(folder: str | Path, tensors: Mapping[str, torch.Tensor], shards: int = 1) -> list[Path]:
    """Write ``tensors`` as model.safetensors, or in order over ``shards`` files with model.safetensors.index.json."""
    from safetensors.torch import save_file

    folder = Path(folder)
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return [folder / "model.safetensors"]
    names = list(tensors)
    paths, weight_map = [], {}
    for i in range(shards):
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        path = folder / f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, path, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, path.name))
        paths.append(path)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return paths


def _parameters(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
    """Name, shape, mean and standard deviation of each tensor.

    Projections into a residual of width H keep unit scale with 1/sqrt(inputs). Queries and keys are twice that, for attention
    that picks out tokens; what is added to the residual is four times that, so that it outweighs the embedding of the last
    token, which a tied head would otherwise just repeat. Gemma's embeddings are larger, and the norms behind attention and MLP
    decide what is added; its norms multiply with one plus their weight.
    """
    hidden, inter, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    kv_heads, head = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    family = config["model_type"]
    gemma = family in ("gemma2", "gemma3_text")
    one = 0.0 if gemma else 1.0
    qkv_bias = family == "qwen2" or bool(config.get("attention_bias"))
    unit = hidden**-0.5

    yield "model.embed_tokens.weight", (config["vocab_size"], hidden), 0.0, LOGIT_STD * unit
    for i in range(layers):
        prefix = f"model.layers.{i}"
        yield f"{prefix}.input_layernorm.weight", (hidden,), one, 0.1
        for name, outputs, std in (("q", heads, 2 * unit), ("k", kv_heads, 2 * unit), ("v", kv_heads, unit)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (outputs * head, hidden), 0.0, std
            if qkv_bias:
                yield f"{prefix}.self_attn.{name}_proj.bias", (outputs * head,), 0.0, 0.5
        if family in ("qwen3", "gemma3_text"):
            for name in ("q_norm", "k_norm"):
                yield f"{prefix}.self_attn.{name}.weight", (head,), 0.5 + one, 0.2
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, heads * head), 0.0, 4 * (heads * head) ** -0.5
        if config.get("attention_bias"):
            yield f"{prefix}.self_attn.o_proj.bias", (hidden,), 0.0, 0.2
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,), 7.0 if gemma else 1.0, 0.1
        if gemma:
            yield f"{prefix}.pre_feedforward_layernorm.weight", (hidden,), 0.0, 0.1
            yield f"{prefix}.post_feedforward_layernorm.weight", (hidden,), 7.0, 0.1
        for name, shape in (("gate", (inter, hidden)), ("up", (inter, hidden)), ("down", (hidden, inter))):
            yield f"{prefix}.mlp.{name}_proj.weight", shape, 0.0, (4 if name == "down" else 1) * shape[1] ** -0.5
            if config.get("mlp_bias"):
                yield f"{prefix}.mlp.{name}_proj.bias", shape[:1], 0.0, 0.2
    yield "model.norm.weight", (hidden,), one, 0.1
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (config["vocab_size"], hidden), 0.0, LOGIT_STD * unit
