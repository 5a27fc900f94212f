"""Configurations made from GGUF metadata equal the config.json that the file was written from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegboard.contracts.weight_loader import WeightsError
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.gguf_files import write_gguf
from pegboard_plugins.loaders.gguf_config import gguf_config, gguf_generation_config, llama3_factors
from pegboard_plugins.loaders.gguf_metadata import read_gguf

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

Write = Callable[..., dict[str, Any]]


@pytest.fixture
def written(tmp_path: Path) -> Write:
    """Makes a GGUF of a tiny checkpoint and gives its configuration."""

    def write(architecture: str = "LlamaForCausalLM", file_type: str = "F32", **options: Any) -> dict[str, Any]:
        checkpoint = {key: options.pop(key) for key in ("tie_word_embeddings", "head_dim") if key in options}
        folder = make_checkpoint(tmp_path / "checkpoint", architecture, num_layers=1, **checkpoint)
        return gguf_config(read_gguf(write_gguf(folder, tmp_path / "model.gguf", file_type, **options)))

    return write


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"]
)
@pytest.mark.parametrize("tied", [True, False])
def test_it_says_what_config_json_said(written: Write, tmp_path: Path, architecture: str, tied: bool) -> None:
    found = written(architecture, tie_word_embeddings=tied, head_dim=32)
    expected = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    for key in ("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rope_theta",
                "tie_word_embeddings", "bos_token_id", "eos_token_id", "dtype"):  # fmt: skip
        assert found[key] == expected[key], key
    assert found["rms_norm_eps"] == np.float32(expected["rms_norm_eps"])
    assert "rope_scaling" not in found


def test_what_gemma_files_say(written: Write) -> None:
    found = written("Gemma2ForCausalLM")
    assert (found["hidden_activation"], found["sliding_window"], found["query_pre_attn_scalar"]) == ("gelu_pytorch_tanh", 8, 24)
    assert (found["attn_logit_softcapping"], found["final_logit_softcapping"]) == (10.0, 15.0)
    assert found["layer_types"] == ["sliding_attention"]
    found = written("Gemma3ForCausalLM", metadata={"gemma3.rope.freq_base_swa": 5.0, "gemma3.final_logit_softcapping": 3.0})
    assert (found["rope_theta"], found["rope_local_base_freq"], found["final_logit_softcapping"]) == (1e6, 5.0, 3.0)
    assert found["attn_logit_softcapping"] is None


def test_what_gemma_files_leave_out(written: Write) -> None:
    keys = ("sliding_window", "sliding_window_pattern", "scale")
    old = {f"gemma2.attention.{key}": ... for key in keys} | {"gemma2.attn_logit_softcapping": ..., "gemma2.block_count": 4}
    found = written("Gemma2ForCausalLM", metadata=old)
    assert (found["sliding_window"], found["attn_logit_softcapping"], found["query_pre_attn_scalar"]) == (4096, 50.0, 16)
    assert found["layer_types"] == ["sliding_attention", "full_attention"] * 2
    found = written("Gemma2ForCausalLM", metadata=old | {"gemma2.block_count": 46, "gemma2.attention.head_count": 8})
    assert found["query_pre_attn_scalar"] == 64 // 8, "the largest model's scores are scaled by the hidden size over the heads"
    new = {"gemma3.attention.sliding_window_pattern": ..., "gemma3.block_count": 8, "gemma3.attention.scale": ...}
    found = written("Gemma3ForCausalLM", metadata=new)
    assert [i for i, kind in enumerate(found["layer_types"]) if kind == "full_attention"] == [5]
    assert found["rope_local_base_freq"] == 10000.0
    found = written("Gemma3ForCausalLM", metadata=new | {"gemma3.attention.sliding_window": ...})
    assert (found["sliding_window"], set(found["layer_types"])) == (None, {"full_attention"})
    scaled = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    assert written("Gemma3ForCausalLM", metadata=scaled)["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


def test_gemma_patterns_may_be_given_by_layer(written: Write) -> None:
    key = "gemma3.attention.sliding_window_pattern"
    found = written("Gemma3ForCausalLM", metadata={key: [True, False, True], "gemma3.block_count": 3})
    assert found["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    with pytest.raises(WeightsError, match=r"sliding_window_pattern has 2 items for 3 layers"):
        written("Gemma3ForCausalLM", metadata={key: [True, False], "gemma3.block_count": 3})
    with pytest.raises(WeightsError, match=r"sliding_window_pattern is 0"):
        written("Gemma3ForCausalLM", metadata={key: 0})


def test_mistral_files_are_llama_files(written: Write) -> None:
    assert written("MistralForCausalLM")["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    ("file_type", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", None), ("Q4_1", None)]
)
def test_dtype_is_that_of_the_matrices(written: Write, file_type: str, dtype: str | None) -> None:
    assert written(file_type=file_type)["dtype"] == dtype


def test_head_size_defaults_to_the_hidden_size_over_the_heads(written: Write) -> None:
    keys = ("llama.attention.key_length", "llama.attention.value_length", "llama.rope.dimension_count")
    assert written(metadata=dict.fromkeys(keys, ...))["head_dim"] == 16


def test_counts_given_per_layer_must_agree(written: Write) -> None:
    assert written(metadata={"llama.attention.head_count_kv": [2, 2]})["num_key_value_heads"] == 2
    with pytest.raises(WeightsError, match=r"head_count_kv is \[2, 4\]"):
        written(metadata={"llama.attention.head_count_kv": [2, 4]})


def test_biases_are_seen_in_the_tensors(written: Write) -> None:
    found = written(edit=lambda tensors: tensors.update({"blk.0.attn_q.bias": np.zeros(64, np.float32)}))
    assert (found["attention_bias"], found["mlp_bias"]) == (True, False)


def test_rope_scaling(written: Write) -> None:
    prefix = "llama.rope.scaling."
    assert written(metadata={prefix + "type": "none"}).get("rope_scaling") is None
    linear = written(metadata={prefix + "type": "linear", prefix + "factor": 2.0})
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert written(metadata={"llama.rope.scale_linear": 4.0})["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    yarn = {prefix + "type": "yarn", prefix + "factor": 4.0, prefix + "original_context_length": 128}
    assert written(metadata=yarn)["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
    }  # fmt: skip


def test_llama3_scaling_is_found_again_from_its_factors(written: Write) -> None:
    factors = llama3_factors(10000.0, 16, LLAMA3).astype(np.float32)
    found = written(edit=lambda tensors: tensors.update({"rope_freqs.weight": factors}))
    assert found["rope_scaling"] == LLAMA3
    assert "rope_scaling" not in written(edit=lambda tensors: tensors.update({"rope_freqs.weight": np.ones(8, np.float32)}))
    with pytest.raises(WeightsError, match="does not follow Llama 3's rule"):
        written(edit=lambda tensors: tensors.update({"rope_freqs.weight": factors[::-1].copy()}))


@pytest.mark.slow
def test_llama3_factors_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = LLAMA3 | {"rope_theta": 500000.0}
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters=scaling)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    assert np.allclose(plain / llama3_factors(500000.0, 128, LLAMA3), expected.numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"general.architecture": "foo"}, "GGUF architecture 'foo' is not supported"),
        ({"general.architecture": ...}, "no general.architecture"),
        ({"llama.block_count": ...}, "metadata key llama.block_count is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": ...}, "layer_norm_rms_epsilon is missing"),
        ({"llama.embedding_length": 0}, "embedding_length is 0"),
        ({"llama.context_length": "long"}, "context_length is 'long'"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.value_length": 8}, "keys of 16 and values of 8"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8 of 16 per head; partial rope"),
    ],
)
def test_defects_are_named(written: Write, metadata: dict[str, Any], expected: str) -> None:
    with pytest.raises(WeightsError, match=expected) as error:
        written(metadata=metadata)
    assert "model.gguf" in str(error.value)


def test_a_missing_embedding_is_named(written: Write) -> None:
    with pytest.raises(WeightsError, match=r"token_embd.weight is missing"):
        written(edit=lambda tensors: tensors.pop("token_embd.weight"))


def test_every_end_token_ends_an_answer(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_layers=1)
    ends = {"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 0}
    assert gguf_generation_config(read_gguf(write_gguf(tmp_path, tmp_path / "a.gguf", metadata=ends))) == {"eos_token_id": [0, 3]}
    without = write_gguf(tmp_path, tmp_path / "b.gguf", metadata={"tokenizer.ggml.eos_token_id": ...})
    assert gguf_generation_config(read_gguf(without)) == {}
