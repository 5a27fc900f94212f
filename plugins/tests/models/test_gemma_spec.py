"""Gemma's ModelSpec and switches from a configuration alone."""

import subprocess
import sys

import pytest

from pegboard.contracts.model_source import ModelSource
from pegboard_plugins.models.gemma_config import gemma_config
from pegboard_plugins.models.spec import gemma_parallel, gemma_spec

GEMMA2, GEMMA3 = "Gemma2ForCausalLM", "Gemma3ForCausalLM"


def stated(architecture, **changes):
    return {"architectures": [architecture], **changes}


def read(architecture, **changes):
    return gemma_config(stated(architecture, **changes), "/models/m")


def spec(architecture, **changes):
    return gemma_spec(ModelSource("m", "/models/m", "dummy", "hf", stated(architecture, **changes)))


@pytest.mark.parametrize(("architecture", "name"), [(GEMMA2, "Gemma2Config"), (GEMMA3, "Gemma3TextConfig")])
def test_what_a_configuration_leaves_out_is_as_transformers_has_it(architecture, name):
    import transformers

    theirs, ours = getattr(transformers, name)(), read(architecture)
    assert (ours.vocab_size, ours.hidden_size, ours.intermediate_size) == (
        theirs.vocab_size, theirs.hidden_size, theirs.intermediate_size,
    )  # fmt: skip
    assert (ours.num_layers, ours.num_heads, ours.num_kv_heads, ours.head_size) == (
        theirs.num_hidden_layers, theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim,
    )  # fmt: skip
    sliding = [kind == "sliding_attention" for kind in theirs.layer_types]
    assert ours.windows == tuple(theirs.sliding_window if slides else None for slides in sliding)
    assert (ours.attention_soft_cap, ours.logit_soft_cap) == (theirs.attn_logit_softcapping, theirs.final_logit_softcapping)
    assert (ours.max_model_len, ours.rms_norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert (ours.tie_word_embeddings, ours.qkv_bias, ours.attention_scale) == (True, False, theirs.query_pre_attn_scalar**-0.5)
    ropes = theirs.rope_parameters
    for rope, slides in zip(ours.ropes, sliding, strict=True):
        wanted = ropes if architecture == GEMMA2 else ropes["sliding_attention" if slides else "full_attention"]
        assert (rope.theta, rope.rope_type) == (wanted["rope_theta"], "default")


def test_spec():
    found = spec(
        GEMMA3, hidden_size=64, intermediate_size=96, num_hidden_layers=7, num_attention_heads=4, head_dim=24, dtype="bfloat16"
    )
    assert (found.num_layers, found.num_heads, found.num_kv_heads, found.head_size) == (7, 4, 4, 24)
    assert (found.sliding_window, found.dtype, found.tie_word_embeddings, found.max_model_len) == (4096, "bfloat16", True, 131072)
    assert found.layer_weights == 4 * 64 * 96 + 3 * 64 * 96
    assert spec(GEMMA3, layer_types=["full_attention"] * 26, sliding_window=None).sliding_window is None


def test_only_full_layers_are_scaled():
    scaling = {"rope_type": "linear", "factor": 8.0}
    found = read(GEMMA3, rope_scaling=scaling)
    assert {rope.factor for rope, window in zip(found.ropes, found.windows, strict=True) if window} == {1.0}
    assert {rope.factor for rope, window in zip(found.ropes, found.windows, strict=True) if not window} == {8.0}
    assert found.max_model_len == 131072, "which is what the scaling has made of it"
    assert {rope.factor for rope in read(GEMMA2, rope_scaling=scaling).ropes} == {8.0}
    assert read(GEMMA2, rope_scaling=scaling).max_model_len == 8 * 8192


def test_older_and_newer_ways_to_say_the_frequencies():
    old = read(GEMMA3, rope_theta=5.0, rope_local_base_freq=3.0, sliding_window_pattern=2)
    new = read(
        GEMMA3,
        rope_parameters={"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 3.0}},
        layer_types=["sliding_attention", "full_attention"] * 13,
    )
    assert old == new
    assert [rope.theta for rope in old.ropes[:2]] == [3.0, 5.0]


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True: .* only causal attention"),
        (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which .* ignores; set it to null"),
        (GEMMA2, {"attn_logit_softcapping": 0}, "attn_logit_softcapping must be a number, more than 0, not 0"),
        (GEMMA2, {"final_logit_softcapping": "30"}, "final_logit_softcapping"),
        (GEMMA2, {"query_pre_attn_scalar": None}, "query_pre_attn_scalar must be a number"),
        (GEMMA2, {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported; .* 'gelu_pytorch_tanh'"),
        (GEMMA2, {"layer_types": ["full_attention"]}, "layer_types must name .* for each of 26 layers"),
        (GEMMA2, {"layer_types": ["chunked_attention"] * 26}, "layer_types"),
        (GEMMA2, {"sliding_window": None}, "lacks 'sliding_window'"),
        (GEMMA3, {"sliding_window": 0}, "sliding_window must be a whole number"),
        (GEMMA3, {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        (GEMMA3, {"num_key_value_heads": 3}, "num_key_value_heads"),
        (GEMMA3, {"head_dim": 7}, "7 of 7 head elements cannot be rotated"),
        (GEMMA3, {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters must hold an object for 'full_attention'"),
        (GEMMA3, {"rope_parameters": {"full_attention": {"rope_type": "odd"}}}, "unknown rope_type 'odd'"),
        (GEMMA3, {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ("GemmaForCausalLM", {}, "this model implements Gemma2ForCausalLM, Gemma3ForCausalLM"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_with_file_and_field(architecture, changes, expected):
    with pytest.raises(ValueError, match=f"/models/m.*{expected}"):
        spec(architecture, **changes)


def test_ranks_share_heads_and_the_inner_width():
    found = spec(GEMMA3, num_attention_heads=4, num_key_value_heads=1, intermediate_size=30)
    assert gemma_parallel(found, 2) == []
    assert any("intermediate_size" in reason for reason in gemma_parallel(found, 4))


def test_reading_a_spec_imports_no_torch():
    code = (
        "import sys; from pegboard_plugins.models.gemma_config import gemma_config;"
        "gemma_config({'architectures': ['Gemma3ForCausalLM']}, 'm'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
