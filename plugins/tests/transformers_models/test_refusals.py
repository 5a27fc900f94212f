"""What cannot run on paged attention is refused by name, with the reason, before any weights are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pegboard.config import ConfigError
from pegboard.contracts.model_source import ModelSource
from pegboard.plugins import PluginError
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.memory_weights import memory_handles
from pegboard_plugins.models.transformers.adapters import REPLACED
from pegboard_plugins.models.transformers.build import UnsupportedModel
from pegboard_plugins.models.transformers.description import describe_model
from pegboard_plugins.models.transformers.masks import Causal, meaning
from pegboard_plugins.models.transformers.model import TransformersModel
from pegboard_plugins.models.transformers.spec import transformers_spec

from .conftest import GROUPED, SIZES

SMALL = {**SIZES, "num_hidden_layers": 4}
KEYS = {**GROUPED, "num_hidden_layers": 4, "head_dim": 16}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "T5ForConditionalGeneration": ("T5Config", {"d_model": 32, "num_layers": 2}, "has an encoder and a decoder"),
    "MambaForCausalLM": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2}, "layers of type linear_attention"),
    "BertLMHeadModel": ("BertConfig", {**SMALL, "intermediate_size": 48}, "its attention is not causal"),
    "DeepseekV3ForCausalLM": (
        "DeepseekV3Config",
        {**SMALL, "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 8, "n_group": 1, "topk_group": 1},
        "where heads of one size are expected",
    ),
    "Llama4ForCausalLM": ("Llama4TextConfig", {**KEYS, "attention_chunk_size": 8}, "neither causal nor a sliding"),
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", KEYS, "layers of type linear_attention"),
    "BambaForCausalLM": (
        "BambaConfig", {**GROUPED, "hidden_size": 64, "mamba_n_heads": 8, "mamba_d_head": 16}, "layers of type linear_attention",
    ),
    "Lfm2ForCausalLM": ("Lfm2Config", {**KEYS, "layer_types": ["conv", "full_attention"] * 2}, "layers of type conv"),
    "BartForCausalLM": ("BartConfig", {"d_model": 32, "decoder_layers": 2}, "has an encoder and a decoder"),
}  # fmt: skip


def content(architecture: str, config: str, options: dict[str, Any]) -> dict[str, Any]:
    made = getattr(transformers, config)(**options)
    return {**json.loads(made.to_json_string()), "architectures": [architecture]}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str) -> None:
    config, options, reason = REFUSED[name]
    found = describe_model(content(name, config, options))
    assert isinstance(found, list)
    assert reason in "; ".join(found)
    source = ModelSource("tiny", "/nowhere", "dummy", "hf", content(name, config, options))
    with pytest.raises(ValueError, match=r"transformers cannot run it on paged attention"):
        transformers_spec(source)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "acme", "auto_map": {"AutoModel": "acme.py"}}, "no model_type 'acme'; its code is in the checkpoint"),
        ({"architectures": ["LlamaForTokenClassification"]}, "lists no such causal language model"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantised \(gptq\)"),
        ({"num_attention_heads": "many"}, "its configuration is refused"),
        ({"hidden_act": "sinusoidal"}, "it cannot be made from its configuration: KeyError"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(change: dict[str, Any], reason: str) -> None:
    import re

    found = describe_model({**content("LlamaForCausalLM", "LlamaConfig", GROUPED), **change})
    assert isinstance(found, list)
    assert re.search(reason, "; ".join(found)), found


# choosing ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """``folder(content)``: with these values in config.json, and some weights that nobody gets to read."""

    def make(values: dict[str, Any]) -> Path:
        made = make_checkpoint(tmp_path / values["model_type"])
        (made / "config.json").write_text(json.dumps(values))
        return made

    return make


def test_an_engine_tells_why_neither_can_run_it(folder: Callable[..., Path], open_llm: Any) -> None:
    config, options, _ = REFUSED["BertLMHeadModel"]
    path = folder(content("BertLMHeadModel", config, options))
    with pytest.raises(
        PluginError, match=r"no installed plugin implements .*BertLMHeadModel.*transformers cannot run it: .*not causal"
    ):
        open_llm(path)
    with pytest.raises(PluginError, match=r"model_impl: 'transformers' cannot run BertLMHeadModel of .*not causal"):
        open_llm(path, model_impl="transformers")


def test_native_is_refused_where_there_is_none(tiny: Any, open_llm: Any) -> None:
    with pytest.raises(PluginError, match=r"OPTForCausalLM.*supported: .*Llama.*model_impl = 'native' leaves 'transformers' out"):
        open_llm(tiny("opt").folder, model_impl="native")
    with pytest.raises(PluginError, match=r"model_impl: 'llama' does not implement OPTForCausalLM of .*, but LlamaForCausalLM"):
        open_llm(tiny("opt").folder, model_impl="llama")
    with pytest.raises(ConfigError, match=r"model_impl: no model is called 'tranformers'; .*did you mean 'transformers'"):
        open_llm(tiny("opt").folder, model_impl="tranformers")


def test_ranks_need_a_plan(tiny: Any, open_llm: Any) -> None:
    for name, sizes, reason in (
        ("opt", {"tensor_parallel_size": 2}, "no plan for sharing the layers of OPTForCausalLM.*work for this model: 1"),
        ("gpt2", {"pipeline_parallel_size": 2}, "no plan for pipeline stages of GPT2LMHeadModel"),
        ("mixtral", {"tensor_parallel_size": 3}, "num_key_value_heads is 2, which 3 does not divide.*work for this model: 1, 2"),
        ("cohere-qk-norm", {"tensor_parallel_size": 2}, "plan for sharing the layers of CohereForCausalLM does not work out"),
    ):
        with pytest.raises(ValueError, match=reason):
            open_llm(tiny(name).folder, executor={"name": "mp", **sizes})


# rows and masks -------------------------------------------------------------------------------------------------------


def loaded(checkpoint: Any) -> TransformersModel:
    spec = transformers_spec(ModelSource("tiny", str(checkpoint.folder), "safetensors", "hf", checkpoint.content))
    model = TransformersModel(spec, torch.float32, torch.device("cpu"))
    model.load_weights(memory_handles(checkpoint.model.state_dict()))
    return model


def test_rows_that_mix_outside_of_attention_are_found(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: plain(self, x + x.roll(1, 1)))
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM.*depends on the tokens beside it"):
        loaded(tiny("llama"))


def test_positions_that_are_counted_are_found(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.opt import modeling_opt

    plain = modeling_opt.OPTLearnedPositionalEmbedding.forward

    def counted(self: Any, attention_mask: Any, cache_length: int = 0, position_ids: Any = None) -> Any:
        return plain(self, attention_mask, cache_length, torch.arange(position_ids.shape[1])[None])

    monkeypatch.setattr(modeling_opt.OPTLearnedPositionalEmbedding, "forward", counted)
    with pytest.raises(UnsupportedModel, match=r"or on its place in the step"):
        loaded(tiny("opt"))


def test_a_layer_that_calls_attention_twice_is_found(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.olmo import modeling_olmo

    plain = modeling_olmo.OlmoAttention.forward

    def twice(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain(self, *args, **kwargs)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(modeling_olmo.OlmoAttention, "forward", twice)
    with pytest.raises(ValueError, match=r"3 modules of its 3 layers call the attention interface 6 times"):
        # another value than elsewhere, so that the description is made anew
        transformers_spec(ModelSource("x", "/nowhere", "dummy", "hf", {**tiny("olmo").content, "rms_norm_eps": 0.5}))


def test_layers_that_attend_in_their_own_way_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.bloom.modeling_bloom import BloomAttention

    monkeypatch.delitem(REPLACED, BloomAttention)
    found = describe_model(content("BloomForCausalLM", "BloomConfig", {**SIZES, "seq_length": 64}))
    assert isinstance(found, list)
    assert "none of its layers calls the attention interface" in "; ".join(found)


def test_masks_are_told_apart() -> None:
    def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key <= query

    def window(size: int) -> Any:
        return lambda batch, head, query, key: (key <= query) & (key > query - size)

    assert meaning(causal) == Causal(None)
    assert [meaning(window(size)) for size in (1, 2, 4096)] == [Causal(1), Causal(2), Causal(4096)]
    assert meaning(lambda batch, head, query, key: (key <= query) & (key // 8 == query // 8)) is None, "chunks"
    assert meaning(lambda batch, head, query, key: key <= query + 1) is None, "a look ahead"
    assert meaning(lambda batch, head, query, key: key > query) is None, "the wrong way"
    assert meaning(lambda batch, head, query, key: (key <= query) & (torch.empty(1, device="meta") > key)) is None, "no values"
