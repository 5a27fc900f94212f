"""The text model of a Gemma 3 checkpoint that also takes images."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from pegboard.contracts.model_source import ModelSource
from pegboard.contracts.weight_loader import WeightsError
from pegboard.testing.memory_weights import memory_handles
from pegboard.testing.model_session import ModelSession
from pegboard_plugins.models.gemma import GemmaForCausalLM
from pegboard_plugins.models.gemma_config import gemma_config
from pegboard_plugins.models.spec import gemma_spec

TEXT = {
    "vocab_size": 200, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8, "max_position_embeddings": 64,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=TEXT, vision_config=VISION, image_token_index=199))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "language_model" in name:
                parameter.normal_(0, 0.3)
    folder = tmp_path_factory.mktemp("images")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def source(folder, source_of):
    return source_of(folder)


def stored(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def logits(source, tensors, ids):
    model = GemmaForCausalLM(gemma_spec(source), torch.float32, torch.device("cpu"))
    model.load_weights(memory_handles(tensors))
    return ModelSession(model).step({"a": ids})["a"]


def test_logits_equal_transformers_and_images_are_left_out(folder, source, tokens, caplog):
    from transformers import Gemma3ForConditionalGeneration

    caplog.set_level(logging.INFO)
    ids = tokens(20, vocab_size=190)
    wanted = Gemma3ForConditionalGeneration.from_pretrained(folder, dtype="float32")(torch.tensor([ids])).logits[0]
    tensors = stored(folder)
    assert float((logits(source, tensors, ids) - wanted).abs().max()) < 1e-4
    images = [name for name in tensors if "language_model" not in name]
    assert f"{len(images)} tensors of the checkpoint's image part are not loaded" in caplog.text
    assert "ignored" not in caplog.text


def test_names_of_older_and_newer_tools(folder, source, tokens):
    ids, tensors = tokens(8, vocab_size=190), stored(folder)
    newer = {name.replace("language_model.model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    assert newer.keys() != tensors.keys()
    wanted = logits(source, tensors, ids)
    assert torch.equal(logits(source, newer, ids), wanted)
    head = torch.randn(200, 32)
    for name in ("lm_head.weight", "language_model.lm_head.weight"):
        assert not torch.equal(logits(source, {**tensors, name: head}, ids), wanted)


def test_a_missing_tensor_is_named(folder, source):
    tensors = {name: tensor for name, tensor in stored(folder).items() if "layers.1.mlp.up_proj" not in name}
    with pytest.raises(WeightsError, match=r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight \[48, 32\]"):
        logits(source, tensors, [1])


def test_what_is_about_all_parts_is_read_from_the_whole(folder):
    whole = json.loads((folder / "config.json").read_text())
    spec = gemma_spec(ModelSource("m", "m", "dummy", "hf", {**whole, "eos_token_id": [1, 106], "dtype": "bfloat16"}))
    assert (spec.vocab_size, spec.num_layers, spec.dtype, spec.eos_token_ids) == (200, 3, "bfloat16", (1, 106))
    assert not gemma_config({**whole, "tie_word_embeddings": False}, "m").tie_word_embeddings
    with pytest.raises(ValueError, match="m: text_config: hidden_size must be"):
        gemma_config({**whole, "text_config": {**whole["text_config"], "hidden_size": 0}}, "m")
    with pytest.raises(ValueError, match="quantised \\(gptq\\)"):
        gemma_config({**whole, "quantization_config": {"quant_method": "gptq"}}, "m")
    with pytest.raises(ValueError, match="m: text_config must be an object, not None"):
        gemma_config({**whole, "text_config": None}, "m")
