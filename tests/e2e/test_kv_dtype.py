"""Keys and values stored in another precision than they are computed in: more room, nearly the same answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegboard import SamplingParams
from pegboard.config import ConfigError
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.thread_executor import THREADS, ThreadRanks

TOLERANCE = {"bfloat16": 0.06, "float16": 0.008, "int8": 0.3, "fp8_e4m3": 0.9}
"""Mean difference from a float32 cache of a text's log probabilities, whose standard deviation is 4. Random weights make much of
small changes: it is about twenty times the rounding of one number, which is what tells the types apart."""


def test_a_cache_of_smaller_numbers_holds_more_tokens(tiny: Any, open_llm: Any) -> None:
    def tokens(dtype: str) -> int:
        llm = open_llm(tiny, kv_cache={"memory": "1MiB", "dtype": dtype})
        assert llm.engine.client.core.info.num_blocks * 16 == llm.engine.client.core.info.kv_tokens
        return llm.engine.client.core.info.kv_tokens + 16  # block 0 holds none

    # two layers of two heads of 16 numbers, keys and values
    assert tokens("auto") == tokens("float32") == (1 << 20) // (2 * 2 * 2 * 16 * 4)
    assert tokens("bfloat16") == tokens("float16") == 2 * tokens("float32")
    assert tokens("int8") == tokens("fp8_e4m3") == tokens("fp8") == 4 * tokens("float32")


def text_logprobs(llm: Any, prompt: list[int]) -> np.ndarray:
    """Of each token of the prompt after the first."""
    [output] = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    return np.array([entry[token].logprob for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_logits_are_nearly_those_of_an_exact_cache(tiny: Any, open_llm: Any, random_prompts: Any, dtype: str) -> None:
    [prompt] = random_prompts([300])
    exact = text_logprobs(open_llm(tiny), prompt)
    llm = open_llm(tiny, kv_cache={"num_blocks": 400, "dtype": dtype})
    [[report]] = llm.collective_rpc("attention_report")
    assert report["kv_dtype"] == {"fp8_e4m3": "float8_e4m3fn"}.get(dtype, dtype)
    assert 0 < np.abs(text_logprobs(llm, prompt) - exact).mean() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_shared_forked_and_preempted_requests_change_nothing(
    tiny: Any, open_llm: Any, greedy: Any, random_prompts: Any, reference: Any, dtype: str
) -> None:
    prompts = [[*start, *rest] for start in random_prompts([48]) for rest in random_prompts([30, 41, 17, 3, 52], seed=1)]
    ample = open_llm(tiny, kv_cache={"num_blocks": 400, "dtype": dtype, "allocator": "paged"})
    expected = [ample.generate([prompt], greedy(20))[0].outputs[0].token_ids for prompt in prompts]
    tight = open_llm(tiny, kv_cache={"num_blocks": 14, "dtype": dtype, "allocator": "prefix"}, scheduler={"max_num_seqs": 5})
    found = tight.generate(prompts, greedy(20))
    for prompt, output, tokens in zip(prompts, found, expected, strict=True):
        reference.check_same(prompt, output.outputs[0].token_ids, tokens)
    assert tight.stats().num_preemptions > 0
    assert tight.stats().prefix_hits > 0
    [forked] = ample.generate([prompts[0]], SamplingParams(n=3, temperature=1.0, top_k=1, max_tokens=20, ignore_eos=True))
    for answer in forked.outputs:
        reference.check_same(prompts[0], answer.token_ids, expected[0])


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_ranks_that_share_layers_store_alike(
    tiny: Any, open_llm: Any, greedy: Any, random_prompts: Any, reference: Any, dtype: str
) -> None:
    kv_cache = {"num_blocks": 100, "dtype": dtype}
    prompts = random_prompts([50, 20, 33])
    alone = [output.outputs[0].token_ids for output in open_llm(tiny, kv_cache=kv_cache).generate(prompts, greedy(12))]
    threads = {"plugins": {"threads": ThreadRanks()}, "executor": {**THREADS, "tensor_parallel_size": 2}}
    together = open_llm(tiny, kv_cache=kv_cache, **threads).generate(prompts, greedy(12))
    for prompt, output, tokens in zip(prompts, together, alone, strict=True):
        reference.check_same(prompt, output.outputs[0].token_ids, tokens)


def test_stages_can_have_float8_but_not_int8(tiny: Any, open_llm: Any, greedy: Any, random_prompts: Any) -> None:
    threads = {"plugins": {"threads": ThreadRanks()}, "executor": {**THREADS, "pipeline_parallel_size": 2}}
    with pytest.raises(Exception, match=r"kv_cache\.dtype = 'int8': its scales are measured .*use 'fp8_e4m3'"):
        open_llm(tiny, kv_cache={"dtype": "int8"}, **threads)
    float8 = {"num_blocks": 50, "dtype": "fp8"}
    found = open_llm(tiny, kv_cache=float8, **threads).generate(random_prompts([30]), greedy(8))
    alone = open_llm(tiny, kv_cache=float8).generate(random_prompts([30]), greedy(8))
    assert found[0].outputs[0].token_ids == alone[0].outputs[0].token_ids


@pytest.fixture
def with_scales(tmp_path: Path) -> Callable[..., Path]:
    """``with_scales(scale, layers)``: the tiny checkpoint with scales for the first so many layers."""
    import torch

    def make(scale: float, layers: int = 2) -> Path:
        def edit(tensors: dict[str, Any]) -> None:
            for layer in range(layers):
                for which in "kv":
                    tensors[f"model.layers.{layer}.self_attn.{which}_scale"] = torch.tensor(scale)

        return make_checkpoint(tmp_path / f"{scale}-{layers}", max_position_embeddings=2048, edit=edit)

    return make


def test_a_float8_cache_uses_the_scales_of_the_checkpoint(
    tiny: Any, open_llm: Any, random_prompts: Any, with_scales: Callable[..., Path]
) -> None:
    [prompt] = random_prompts([100])
    float8 = {"num_blocks": 400, "dtype": "fp8_e4m3"}
    exact, none = text_logprobs(open_llm(tiny), prompt), text_logprobs(open_llm(tiny, kv_cache=float8), prompt)
    good = text_logprobs(open_llm(with_scales(0.75), kv_cache=float8), prompt)
    assert 0 < np.abs(good - exact).mean() < TOLERANCE["fp8_e4m3"]
    assert (good != none).any(), "other numbers are rounded"
    cut_off = text_logprobs(open_llm(with_scales(1e-6), kv_cache=float8), prompt)
    assert np.abs(cut_off - exact).mean() > 2
    for dtype in ("auto", "int8"):
        others = {"num_blocks": 400, "dtype": dtype}
        plain = text_logprobs(open_llm(tiny, kv_cache=others), prompt)
        assert (text_logprobs(open_llm(with_scales(1e-6), kv_cache=others), prompt) == plain).all(), "the scales are for float8"


def test_a_checkpoint_with_some_scales_is_refused_where_they_matter(open_llm: Any, with_scales: Callable[..., Path]) -> None:
    folder = with_scales(1.0, layers=1)
    with pytest.raises(Exception, match=r"lacks 2 of them: model\.layers\.1\.self_attn\.k_scale"):
        open_llm(folder, kv_cache={"dtype": "fp8"})
    open_llm(folder)


def test_what_cannot_be_stored_is_refused(tiny: Any, open_llm: Any) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache\.dtype.*fp8_e4m3"):
        open_llm(tiny, kv_cache={"dtype": "int4"})
