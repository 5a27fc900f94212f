"""Every rope variant against transformers: short prompts, at the trained length, past it, in one step and in chunks."""

import pytest
import torch

from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.model_session import ModelSession
from pegboard_plugins.layers.rope_parameters import rope_parameters
from pegboard_plugins.models.spec import llama_spec

TRAINED = 32
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": TRAINED}
LONG = {"short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6], "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5]}

# name: (config.json keys, context length that follows)
VARIANTS = {
    "default": ({"rope_theta": 500.0}, TRAINED),
    "none-stated": ({"rope_theta": ...}, TRAINED),
    "null-scaling": ({"rope_scaling": None}, TRAINED),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 2 * TRAINED),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 2 * TRAINED),
    "dynamic-new-key": ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 4 * TRAINED),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 4 * TRAINED),
    "yarn-original": (
        {
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
            "max_position_embeddings": 4 * TRAINED,
        },
        4 * TRAINED,
    ),
    "yarn-mscale": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.4, "beta_fast": 16}},
        4 * TRAINED,
    ),
    "yarn-attention-factor": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.3, "truncate": False}},
        2 * TRAINED,
    ),
    "llama3": ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "max_position_embeddings": 8 * TRAINED}, 8 * TRAINED),
    "longrope": (
        {
            "rope_scaling": {"rope_type": "longrope", **LONG, "original_max_position_embeddings": TRAINED},
            "max_position_embeddings": 4 * TRAINED,
        },
        4 * TRAINED,
    ),
    "nested": (
        {"rope_theta": ..., "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 800.0}},
        2 * TRAINED,
    ),
    "nested-default": ({"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}, TRAINED),
    "partial-with-default": ({"partial_rotary_factor": 0.5}, TRAINED),
}  # fmt: skip


@pytest.fixture(params=VARIANTS)
def variant(request, tmp_path):
    keys, max_model_len = VARIANTS[request.param]
    overrides = {"max_position_embeddings": TRAINED, **keys}
    folder = make_checkpoint(tmp_path, tokenizer=False, num_layers=1, vocab_size=300, config_overrides=overrides)
    return folder, max_model_len


def test_logits_and_context_length(variant, load, reference, tokens):
    folder, max_model_len = variant
    model = load(folder)
    assert model.spec.max_model_len == max_model_len
    for length in (6, TRAINED, TRAINED + 2, int(1.9 * TRAINED)):
        ids = tokens(length, vocab_size=300)
        wanted = reference(folder)(torch.tensor([ids])).logits[0]
        whole = ModelSession(model).step({"a": ids})["a"]
        assert float((whole - wanted).abs().max()) < 1e-3, f"at length {length}"
        session, chunks = ModelSession(model), []
        for start in range(0, length, 13):
            chunks.append(session.step({"a": ids[start : start + 13]}, prompt_lens={"a": length})["a"])
        assert float((torch.cat(chunks) - wanted).abs().max()) < 1e-3, f"in chunks at length {length}"


@pytest.mark.parametrize("name", ["dynamic", "longrope", "yarn"])
def test_generation_past_the_trained_length(name, tmp_path, load, reference, tokens):
    overrides = {"max_position_embeddings": TRAINED, **VARIANTS[name][0]}
    make_checkpoint(tmp_path, tokenizer=False, config_overrides=overrides)
    prompt = tokens(TRAINED - 5)
    wanted = reference(tmp_path).generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    wanted = wanted[0, len(prompt) :].tolist()
    model = load(tmp_path)
    assert ModelSession(model).greedy(prompt, 16) == wanted
    # the same when what was generated is computed again in one step, as after a preemption
    logits = ModelSession(model).step({"a": [*prompt, *wanted[:-1]]}, prompt_lens={"a": len(prompt)})["a"]
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == wanted


def test_scaled_types_rotate_the_stated_share(tmp_path, load, tokens):
    """transformers makes frequencies for the share, but its Llama cannot apply them; here the rest of each head is left alone."""
    overrides = {"rope_scaling": {"type": "linear", "factor": 1.0}, "partial_rotary_factor": 0.5}
    model = load(make_checkpoint(tmp_path, tokenizer=False, config_overrides=overrides))
    cos_sin = model.rotaries[0].cos_sin(torch.tensor([0, 3]), None, torch.float32)
    heads = torch.randn(2, 3, 16)
    turned = model.rotaries[0].rotate(heads, cos_sin)
    assert torch.equal(turned[..., 8:], heads[..., 8:])
    assert torch.allclose(turned[0], heads[0])
    a, b, angle = heads[1, :, 0], heads[1, :, 4], torch.tensor(3.0)
    assert torch.allclose(turned[1, :, 0], a * angle.cos() - b * angle.sin())
    assert torch.allclose(turned[1, :, 4], b * angle.cos() + a * angle.sin())


def test_types_that_depend_on_length_say_so_and_need_prompt_lengths(tmp_path, load, source_of):
    folder = make_checkpoint(tmp_path, tokenizer=False, config_overrides=VARIANTS["dynamic"][0])
    assert llama_spec(source_of(folder)).prompt_length_rope
    with pytest.raises(RuntimeError, match="prompt_lens"):
        load(folder).rotaries[0].cos_sin(torch.arange(3), None, torch.float32)


def read(scaling, **config):
    return rope_parameters({"max_position_embeddings": 64, "rope_scaling": scaling, **config}, 16, "x/config.json")


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "wobbly", "factor": 2.0}, "unknown rope_type 'wobbly'"),
        ({"type": "linear", "factor": 0.5}, "factor must be a number, at least 1, not 0.5"),
        ({"type": "linear", "factor": "2"}, "factor"),
        ({"type": "linear"}, "lacks 'factor'"),
        ({"type": "yarn"}, "lacks 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0}, "lacks 'low_freq_factor'"),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 0.5}, "high_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "short_factor must be a list of 8"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("linear", "rope_scaling must be an object"),
        ({"full_attention": {"rope_type": "default"}}, "per layer type"),
    ],
)
def test_nonsense_is_refused_with_file_and_field(scaling, message):
    with pytest.raises(ValueError, match=r"x/config\.json") as caught:
        read(scaling)
    assert message in str(caught.value)


def test_a_missing_context_length_is_refused():
    with pytest.raises(ValueError, match="lacks 'max_position_embeddings'"):
        read(None, max_position_embeddings=None)


def test_yarn_without_factor_takes_the_ratio_of_lengths():
    parameters = read({"type": "yarn", "original_max_position_embeddings": 16})
    assert parameters.factor == 4.0
    assert parameters.max_model_len == 64
