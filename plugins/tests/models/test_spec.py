"""ModelSpec from a configuration alone."""

import subprocess
import sys

import pytest

from pegboard.contracts.model_source import ModelSource
from pegboard.testing.checkpoints import make_checkpoint
from pegboard_plugins.models.spec import llama_spec

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip


def spec(generation=None, **changes):
    config = {k: v for k, v in {**CONFIG, **changes}.items() if v is not ...}
    return llama_spec(ModelSource("m", "/models/m", "dummy", "hf", config, generation or {}))


def test_sizes_and_defaults():
    found = spec()
    assert (found.num_layers, found.num_heads, found.num_kv_heads, found.head_size) == (2, 4, 4, 16)
    assert (found.max_model_len, found.dtype, found.sliding_window, found.tie_word_embeddings) == (256, None, None, False)
    assert not found.prompt_length_rope
    assert found.layer_weights == 4 * 64 * 64 + 3 * 64 * 128
    assert spec(num_key_value_heads=2, attention_bias=True).layer_weights == 3 * 64 * 64 + 3 * 64 * 128
    assert found.details["hidden_size"] == 64


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_size": ...}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_attention_heads": 5}, "head_dim"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"max_position_embeddings": ...}, "max_position_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"dtype": "int3"}, "dtype"),
        ({"architectures": ["BertModel"]}, "BertModel"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "sliding_window"),
    ],
)
def test_nonsense_is_refused_with_file_and_field(changes, field):
    with pytest.raises(ValueError, match="/models/m") as caught:
        spec(**changes)
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({"dtype": None}, None),
    ],
)
def test_dtype_is_read_from_either_key(changes, dtype):
    assert spec(**changes).dtype == dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_configuration_without_dtype_follows_the_files(dtype, shards, tmp_path, source_of):
    folder = make_checkpoint(tmp_path, dtype=dtype, shards=shards, tokenizer=False, config_overrides={"dtype": ...})
    assert llama_spec(source_of(folder)).dtype == dtype


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": 5}, 5, (5,)),
        ({"eos_token_id": [5, 7]}, 9, (5, 7, 9)),
        ({}, 9, (9,)),
        ({"eos_token_id": None}, [9, 3], (9, 3)),
        ({"eos_token_id": 4}, None, (4,)),
        ({}, None, ()),
    ],
)
def test_eos_ids_are_the_union(generation, config, ids):
    assert spec(generation, eos_token_id=config).eos_token_ids == ids


def test_an_eos_id_outside_the_vocabulary_is_left_out():
    assert spec({"eos_token_id": [5, 100, "x", True]}, eos_token_id=-1).eos_token_ids == (5,)


def test_windows_by_architecture():
    mistral, qwen = {"architectures": ["MistralForCausalLM"]}, {"architectures": ["Qwen2ForCausalLM"]}
    assert spec(**mistral).sliding_window == 4096
    assert spec(**mistral, sliding_window=None).sliding_window is None
    assert spec(sliding_window=8).sliding_window is None
    assert spec(**qwen, sliding_window=8).sliding_window is None
    assert spec(**qwen, sliding_window=8, use_sliding_window=True, max_window_layers=1).sliding_window == 8
    assert spec(**qwen, sliding_window=8, use_sliding_window=True, max_window_layers=2).sliding_window is None


def test_a_partial_rotation_that_has_no_effect_is_told(caplog):
    spec(partial_rotary_factor=0.5)
    assert "partial_rotary_factor" in caplog.text


def test_reading_a_spec_imports_no_torch():
    code = "import sys, pegboard_plugins.models.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
