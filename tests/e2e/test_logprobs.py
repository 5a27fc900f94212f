"""Log probabilities of outputs and prompts, against transformers: members, order, ranks, values; chunks, hits, preemption."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pegboard import SamplingParams

CLOSE = 1e-3


def check(entries: list[dict[int, Any]], expected: np.ndarray, tokens: list[int], k: int) -> None:
    """One entry per token: the token itself first, then the best ``k`` in falling order, values and ranks those of ``expected``
    [len(tokens), vocab]."""
    assert len(entries) == len(tokens)
    for row, token, entry in zip(expected, tokens, entries, strict=True):
        order = np.sort(row)[::-1]
        assert next(iter(entry)) == token
        others = [i for i in entry if i != token]
        ranks = [entry[i].rank for i in others]
        own = entry[token].rank
        assert len(others) == (k if own > k else max(k - 1, 0))
        assert ranks == [r for r in range(1, k + 1) if r != own]
        for found, value in entry.items():
            assert math.isfinite(value.logprob)
            assert abs(value.logprob - row[found]) < CLOSE
            assert abs(order[value.rank - 1] - row[found]) < CLOSE


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_of_the_output(tiny: Any, open_llm: Any, random_prompts: Any, reference: Any, temperature: float) -> None:
    """Raw ones: neither temperature nor penalties change them."""
    llm = open_llm(tiny)
    [prompt] = random_prompts([33], seed=48)
    kinds = {"temperature": temperature, "seed": 3, "max_tokens": 16, "ignore_eos": True, "presence_penalty": 1.0}
    counts = (0, 1, 5, 20)
    outputs = llm.generate([prompt] * 4, [SamplingParams(logprobs=k, **kinds) for k in counts])
    outside = 0
    for output, k in zip(outputs, counts, strict=True):
        answer = output.outputs[0]
        check(answer.logprobs, reference.logprobs(prompt, answer.token_ids), answer.token_ids, k)
        own = [entry[token] for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        outside += sum(entry.rank > 20 for entry in own)
        assert answer.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in own))
    assert temperature == 0 or outside, "a drawn token is sometimes not among the best"
    assert llm.generate([prompt], SamplingParams(max_tokens=2))[0].outputs[0].logprobs is None


def check_prompt(output: Any, reference: Any, k: int) -> None:
    prompt = output.prompt_token_ids
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    if len(prompt) > 1:
        check(output.prompt_logprobs[1:], reference.logprobs(prompt[:1], prompt[1:]), prompt[1:], k)


@pytest.mark.parametrize("budget", [2048, 64, 17])
def test_of_the_prompt_in_any_chunks(tiny: Any, open_llm: Any, random_prompts: Any, reference: Any, budget: int) -> None:
    llm = open_llm(tiny, scheduler={"max_num_batched_tokens": budget, "max_num_seqs": 8})
    lengths = [1, 2, 15, 16, 17, 120, 200]
    params = [SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=k) for k in (0, 1, 5, 20, 2, 3, 0)]
    for output, one in zip(llm.generate(random_prompts(lengths, seed=4), params), params, strict=True):
        check_prompt(output, reference, one.prompt_logprobs or 0)


def test_of_a_prompt_that_is_cached(tiny: Any, open_llm: Any, random_prompts: Any, reference: Any, greedy: Any) -> None:
    llm = open_llm(tiny)
    [prompt] = random_prompts([100], seed=5)
    [plain] = llm.generate([prompt], greedy(4))
    [output] = llm.generate([prompt], greedy(4, prompt_logprobs=2))
    check_prompt(output, reference, 2)
    assert output.num_cached_tokens == 0, "every position has to be computed"
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    [again] = llm.generate([prompt], greedy(4))
    assert again.num_cached_tokens == 96
    assert again.prompt_logprobs is None


def test_of_prompts_that_are_preempted(tiny: Any, open_llm: Any, random_prompts: Any, reference: Any) -> None:
    llm = open_llm(
        tiny, scheduler={"max_num_batched_tokens": 32, "max_num_seqs": 6}, kv_cache={"num_blocks": 21, "block_size": 8}
    )
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, prompt_logprobs=3)
    outputs = llm.generate(random_prompts([30, 41, 52, 37, 60, 33], seed=6), params)
    assert llm.stats().num_preemptions > 0
    for output in outputs:
        check_prompt(output, reference, 3)
        assert len(output.outputs[0].token_ids) == 40
    llm.engine.client.core.scheduler.check_integrity()


def test_a_neighbour_that_asks_for_many_changes_nobody(tiny: Any, open_llm: Any, random_prompts: Any, greedy: Any) -> None:
    llm = open_llm(tiny)
    prompts = random_prompts([50, 300], seed=8)
    [alone] = llm.generate(prompts[:1], greedy(10))
    llm.reset_prefix_cache()
    [beside, _] = llm.generate(prompts, [greedy(10), greedy(10, prompt_logprobs=20)])
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("length", [126, 127])
def test_at_the_edge_of_the_context(tiny: Any, open_llm: Any, random_prompts: Any, reference: Any, length: int) -> None:
    llm = open_llm(tiny, max_model_len=128)
    [output] = llm.generate(random_prompts([length]), SamplingParams(temperature=0, max_tokens=None, prompt_logprobs=1))
    check_prompt(output, reference, 1)
    assert len(output.outputs[0].token_ids) == 128 - length
