"""Logits of every architecture and switch against transformers on the same folder, float32."""

import pytest
import torch

from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.model_session import ModelSession

CASES = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-biases": ("LlamaForCausalLM", {"config_overrides": {"attention_bias": True, "mlp_bias": True}}),
    "llama-one-kv-head": ("LlamaForCausalLM", {"num_kv_heads": 1, "head_dim": 32}),
    "llama-no-groups": ("LlamaForCausalLM", {"config_overrides": {"num_key_value_heads": None}, "num_kv_heads": 4}),
    "smollm": ("LlamaForCausalLM", {"tie_word_embeddings": True, "hidden_size": 72, "num_heads": 9, "num_kv_heads": 3}),
    "mistral": ("MistralForCausalLM", {}),
    "mistral-window": ("MistralForCausalLM", {"config_overrides": {"sliding_window": 7}}),
    "mistral-head-dim": ("MistralForCausalLM", {"head_dim": 24}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2-window-off": ("Qwen2ForCausalLM", {"config_overrides": {"sliding_window": 7, "use_sliding_window": False}}),
    "qwen2-window-upper-layers": (
        "Qwen2ForCausalLM",
        {"config_overrides": {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32}),
    "qwen3-biases-tied": (
        "Qwen3ForCausalLM",
        {"tie_word_embeddings": True, "config_overrides": {"attention_bias": True}},
    ),
    "qwen3-layer-types": (
        "Qwen3ForCausalLM",
        {
            "config_overrides": {
                "sliding_window": 5,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            }
        },
    ),
    "gemma2": ("Gemma2ForCausalLM", {"tie_word_embeddings": True}),
    "gemma2-untied": ("Gemma2ForCausalLM", {"hidden_size": 40, "head_dim": 24, "num_layers": 3}),
    "gemma2-no-caps": (
        "Gemma2ForCausalLM",
        {"config_overrides": {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 5}},
    ),
    "gemma2-linear-rope": ("Gemma2ForCausalLM", {"config_overrides": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}}),
    "gemma3": ("Gemma3ForCausalLM", {"tie_word_embeddings": True, "num_layers": 4}),
    "gemma3-untied-biases": (
        "Gemma3ForCausalLM",
        {"head_dim": 24, "num_kv_heads": 1, "config_overrides": {"attention_bias": True, "final_logit_softcapping": 10.0}},
    ),
    "gemma3-scaled-full-layers": (
        "Gemma3ForCausalLM",
        {"config_overrides": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 50.0}},
    ),
    "gemma3-ropes-by-layer-type": (
        "Gemma3ForCausalLM",
        {
            "config_overrides": {
                "layer_types": ["full_attention", "sliding_attention"],
                "rope_theta": ...,
                "rope_local_base_freq": ...,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                },
            }
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, tmp_path, load, reference, tokens):
    architecture, options = CASES[case]
    make_checkpoint(tmp_path, architecture, tokenizer=False, **options)
    ids = tokens(30)
    wanted = reference(tmp_path)(torch.tensor([ids])).logits[0]
    model = load(tmp_path)
    got = ModelSession(model).step({"a": ids})["a"]
    assert float((got - wanted).abs().max()) < 1e-4


def test_greedy_generation_equals_transformers(tmp_path, load, reference, tokens):
    make_checkpoint(tmp_path, "Qwen3ForCausalLM", tokenizer=False)
    prompt = tokens(12)
    wanted = reference(tmp_path).generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert ModelSession(load(tmp_path)).greedy(prompt, 20) == wanted[0, len(prompt) :].tolist()


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_close(dtype, architecture, tmp_path, load, reference, tokens):
    make_checkpoint(tmp_path, architecture, hidden_size=72, tokenizer=False)  # its square root is not a number of either type
    ids = tokens(30)
    wanted = reference(tmp_path)(torch.tensor([ids])).logits[0]
    theirs = reference(tmp_path, dtype)(torch.tensor([ids])).logits[0].float()
    got = ModelSession(load(tmp_path, dtype)).to(dtype).step({"a": ids})["a"]
    error, their_error = (float((x - wanted).norm() / wanted.norm()) for x in (got, theirs))
    assert error < 1.3 * their_error
