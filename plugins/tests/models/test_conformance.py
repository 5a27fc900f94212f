"""The model and the safetensors and dummy loaders against their contracts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pegboard.contracts.model_source import ModelSource
from pegboard.plugins.provider import ModelProvider
from pegboard.testing.checkpoints import ARCHITECTURES, make_checkpoint, random_tensors, write_shards
from pegboard.testing.conformance.model import ModelConformance
from pegboard.testing.conformance.weight_loader import WeightLoaderConformance
from pegboard_plugins.loaders.dummy import DummyLoader
from pegboard_plugins.loaders.safetensors_loader import SafetensorsLoader
from pegboard_plugins.models.gemma import GemmaForCausalLM
from pegboard_plugins.models.llama import LlamaForCausalLM
from pegboard_plugins.models.spec import gemma_spec, llama_spec

SMALL = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip


class _Llama(ModelConformance):
    architecture = "LlamaForCausalLM"
    options: dict = {}

    @property
    def config(self):
        return {"architectures": [self.architecture], **ARCHITECTURES[self.architecture], **SMALL, **self.options}

    def spec(self):
        return llama_spec(ModelSource("tiny", "tiny", "dummy", "hf", self.config))

    def make(self):
        return LlamaForCausalLM(self.spec(), torch.float32, torch.device("cpu"))

    ranks = ((2, 1), (4, 1), (1, 2), (2, 2))

    def make_rank(self, world, communicator, layers):
        return LlamaForCausalLM(self.spec(), torch.float32, torch.device("cpu"), world, communicator, layers)

    def tensors(self):
        return random_tensors(self.config, seed=1)


class TestLlama(_Llama):
    options = {"attention_bias": True, "mlp_bias": True}


class TestMistral(_Llama):
    architecture = "MistralForCausalLM"
    options = {"sliding_window": 5}


class TestQwen2(_Llama):
    architecture = "Qwen2ForCausalLM"
    options = {"tie_word_embeddings": True}


class TestQwen3(_Llama):
    architecture = "Qwen3ForCausalLM"


class TestDynamicRope(_Llama):
    options = {"max_position_embeddings": 8, "rope_scaling": {"type": "dynamic", "factor": 4.0}}


class _Gemma(_Llama):
    options = {"query_pre_attn_scalar": 8, "tie_word_embeddings": True}

    def spec(self):
        return gemma_spec(ModelSource("tiny", "tiny", "dummy", "hf", self.config))

    def make(self):
        return GemmaForCausalLM(self.spec(), torch.float32, torch.device("cpu"))

    def make_rank(self, world, communicator, layers):
        return GemmaForCausalLM(self.spec(), torch.float32, torch.device("cpu"), world, communicator, layers)


class TestGemma2(_Gemma):
    architecture = "Gemma2ForCausalLM"


class TestGemma3(_Gemma):
    architecture = "Gemma3ForCausalLM"


class TestSafetensors(WeightLoaderConformance):
    shards = 1

    def make(self):
        return SafetensorsLoader()

    def write(self, folder):
        make_checkpoint(folder, num_layers=1, hidden_size=32, vocab_size=40, tokenizer=False)
        config = {"architectures": ["LlamaForCausalLM"], **ARCHITECTURES["LlamaForCausalLM"], **SMALL}
        tensors = random_tensors(config, dtype="bfloat16")
        (folder / "model.safetensors").unlink()
        write_shards(folder, tensors, self.shards)
        return ModelSource("tiny", str(folder), "safetensors", "hf", config), tensors


class TestShardedSafetensors(TestSafetensors):
    shards = 3


def test_dummy_weights_load_and_depend_on_the_seed():
    config = {"architectures": ["LlamaForCausalLM"], **ARCHITECTURES["LlamaForCausalLM"], **SMALL, "attention_bias": True}
    source = ModelSource("tiny", "/nowhere", "dummy", "hf", config)
    spec = llama_spec(source)
    provider = ModelProvider(name="llama", target=LlamaForCausalLM)

    def read(seed):
        loader = DummyLoader(SimpleNamespace(seed=seed), SimpleNamespace(parts={"model": provider}))
        with loader.open(source, spec) as handles:
            model = LlamaForCausalLM(spec, torch.float32, torch.device("cpu"))
            model.load_weights(handles)
            return {name: handle.read() for name, handle in handles.items()}

    first, again, other = read(0), read(0), read(1)
    assert {name: tuple(t.shape) for name, t in first.items()} == LlamaForCausalLM.checkpoint_tensors(spec)
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first["model.layers.0.mlp.down_proj.weight"])
    assert float(first[name].std()) == pytest.approx(48**-0.5, rel=0.1)


def test_slices_of_dummy_weights_are_parts_of_the_whole():
    from pegboard_plugins.loaders.dummy import DummyHandle

    handle = DummyHandle("w", (8, 6), seed=0)
    assert torch.equal(handle.read_slice(0, 2, 3), handle.read()[2:5])


def test_a_model_that_tells_no_tensors_has_no_dummy_weights():
    class Silent:
        @classmethod
        def checkpoint_tensors(cls, spec):
            return None

    loader = DummyLoader(SimpleNamespace(seed=0), SimpleNamespace(parts={"model": ModelProvider(name="silent", target=Silent)}))
    with pytest.raises(ValueError, match="silent"), loader.open(None, None):
        pass


def test_several_ranks_need_a_communicator():
    from pegboard.wire import World

    spec = llama_spec(
        ModelSource(
            "tiny",
            "tiny",
            "dummy",
            "hf",
            {"architectures": ["LlamaForCausalLM"], **ARCHITECTURES["LlamaForCausalLM"], **SMALL},
        )
    )
    with pytest.raises(ValueError, match="2 ranks that share layers need a communicator"):
        LlamaForCausalLM(spec, torch.float32, torch.device("cpu"), World(tp_size=2))


def test_parameters_are_listed_once_with_their_bytes():
    config = {"architectures": ["LlamaForCausalLM"], **ARCHITECTURES["LlamaForCausalLM"], **SMALL}
    spec = llama_spec(ModelSource("tiny", "tiny", "dummy", "hf", config))
    model = LlamaForCausalLM(spec, torch.float32, torch.device("cpu"))
    from pegboard.testing.memory_weights import memory_handles

    tensors = random_tensors(config)
    model.load_weights(memory_handles(tensors))
    parameters = model.parameters()
    assert sum(p.nbytes for p in parameters.values()) == sum(t.nbytes for t in tensors.values())
    assert "model.layers.1.self_attn.qkv_proj.weight" in parameters
