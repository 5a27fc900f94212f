"""Tiny random checkpoints of many architectures, written by transformers itself, and what transformers generates from them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pegboard import LLM
from pegboard.testing.tiny_tokenizer import write_tokenizer

VOCABULARY = 300
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48}
ALTERNATING = {
    "head_dim": 16,
    "sliding_window": 8,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}
MULTIPLIERS = {
    "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3,
}  # fmt: skip
SINKS = {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
ODD_HEADS = {"hidden_size": 48, "num_attention_heads": 6}
"""No power of two, for which slopes follow another rule."""
NARROW = {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False}
LONG_ROPE = {
    "original_max_position_embeddings": 24,
    "rope_parameters": {
        "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 5.0, 8.0], "rope_theta": 10000.0,
        "original_max_position_embeddings": 24,
    },
}  # fmt: skip

TINY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "opt": ("OPTForCausalLM", "OPTConfig", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "opt-post-norm": ("OPTForCausalLM", "OPTConfig", {**SIZES, **NARROW}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", SIZES),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**SIZES, "intermediate_size": 48, "tie_word_embeddings": False}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**GROUPED, "original_max_position_embeddings": 128}),
    "phi3-longrope": ("Phi3ForCausalLM", "Phi3Config", {**GROUPED, **LONG_ROPE}),
    "falcon": ("FalconForCausalLM", "FalconConfig", SIZES),
    "falcon-new": ("FalconForCausalLM", "FalconConfig", {**SIZES, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon-alibi": ("FalconForCausalLM", "FalconConfig", {**SIZES, "alibi": True}),
    "falcon-alibi-odd": ("FalconForCausalLM", "FalconConfig", {**SIZES, **ODD_HEADS, "alibi": True}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {**SIZES, "seq_length": 128}),
    "bloom-odd": ("BloomForCausalLM", "BloomConfig", {**SIZES, **ODD_HEADS, "seq_length": 128}),
    "mpt": ("MptForCausalLM", "MptConfig", {**SIZES, "max_seq_len": 128, "attn_config": {"clip_qkv": 3.0}}),
    "mpt-odd": ("MptForCausalLM", "MptConfig", {**SIZES, **ODD_HEADS, "max_seq_len": 128}),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", GROUPED),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", {**GROUPED, "clip_qkv": 2.0}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {**GROUPED, **MULTIPLIERS}),
    "cohere": ("CohereForCausalLM", "CohereConfig", {**GROUPED, "logit_scale": 0.25}),
    "cohere-qk-norm": ("CohereForCausalLM", "CohereConfig", {**GROUPED, "use_qk_norm": True}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, **ALTERNATING, **CAPS}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, **ALTERNATING}),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", {**GROUPED, **SINKS}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
}  # fmt: skip


class Tiny:
    """One checkpoint and its reference."""

    def __init__(self, name: str, folder: Path) -> None:
        architecture, config, options = TINY[name]
        self.folder, self.architecture = folder, architecture
        torch.manual_seed(len(name))
        self.model = getattr(transformers, architecture)(getattr(transformers, config)(**options)).eval()
        with torch.no_grad():
            for key, parameter in self.model.named_parameters():
                wide = 4 if "emb" in key or "wte" in key else 2
                if parameter.ndim > 1:
                    parameter.normal_(0, wide * parameter.shape[-1] ** -0.5)
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        self.model.save_pretrained(folder)
        write_tokenizer(folder, size=VOCABULARY)
        self.content: dict[str, Any] = json.loads((folder / "config.json").read_text())

    def generate(self, prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": count, "do_sample": False, "eos_token_id": None}
        found = self.model.generate(ids, **options)[0, len(prompt) :]
        return [int(token) for token in found]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """``tiny(name)``: made once."""
    made: dict[str, Tiny] = {}

    def get(name: str) -> Tiny:
        if name not in made:
            made[name] = Tiny(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture
def open_llm() -> Iterator[Callable[..., LLM]]:
    """``open_llm(folder, config fields)``: one thread, closed after the test."""
    opened: list[LLM] = []

    def open_(folder: Path | str, **options: Any) -> LLM:
        options["executor"] = {"num_threads": 1, **options.get("executor", {})}
        opened.append(LLM(str(folder), **{"dtype": "float32", **options}))
        return opened[-1]

    yield open_
    for llm in opened:
        llm.shutdown()


def random_prompts(*lengths: int, seed: int = 0, start: int = 0) -> list[list[int]]:
    """Of these lengths; the first ``start`` tokens are the same in all of them."""
    draw = random.Random(seed)
    shared = [draw.randrange(3, VOCABULARY) for _ in range(start)]
    return [shared + [draw.randrange(3, VOCABULARY) for _ in range(length - start)] for length in lengths]
