"""Several answers to one prompt: each as a request of its own, the prompt computed once, its blocks shared."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from pegboard import OutputKind, SamplingParams
from pegboard.testing.scripted_model import ScriptedPlugin


def alone(llm: Any, prompt: Any, n: int, **fields: Any) -> list[list[int]]:
    """What ``n`` requests of their own say, one after the other."""
    seed = fields.pop("seed")
    params = [SamplingParams(seed=seed + i, **fields) for i in range(n)]
    return [llm.generate([prompt], one)[0].outputs[0].token_ids for one in params]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 64])
@pytest.mark.parametrize("allocator", ["paged", "prefix"])
def test_each_answer_is_that_of_a_request_of_its_own(
    tiny: Any, open_llm: Any, random_prompts: Any, reference: Any, length: int, allocator: str
) -> None:
    kv_cache = {"num_blocks": 400, "allocator": allocator}
    llm, other = open_llm(tiny, kv_cache=kv_cache), open_llm(tiny, kv_cache=kv_cache)
    [prompt] = random_prompts([length], seed=length)
    fields: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 20, "ignore_eos": True, "frequency_penalty": 0.3}
    [output] = llm.generate([prompt], SamplingParams(n=5, **fields))
    expected = alone(other, prompt, 5, **fields)
    assert [a.index for a in output.outputs] == [0, 1, 2, 3, 4]
    assert [a.token_ids for a in output.outputs] == expected
    assert len({tuple(a.token_ids) for a in output.outputs}) == 5
    assert llm.stats().kv_usage == 0
    llm.engine.client.core.scheduler.check_integrity()


def test_the_prompt_is_computed_once_and_its_blocks_are_shared(tiny: Any, open_llm: Any, random_prompts: Any) -> None:
    """512 tokens are 32 full blocks; after five tokens of output each answer holds one block more."""
    for length, shared in ((512, 32), (520, 32)):
        engine = open_llm(tiny, kv_cache={"num_blocks": 400, "allocator": "paged"}).engine
        [prompt] = random_prompts([length])
        engine.add_request("x", prompt, SamplingParams(n=8, temperature=1, seed=1, max_tokens=30, ignore_eos=True))
        engine.step()
        assert engine.stats().num_scheduled_tokens == length, "the prompt's tokens, once"
        for _ in range(5):
            engine.step()
        assert engine.stats().num_scheduled_tokens == length + 5 * 8
        assert round(engine.stats().kv_usage * 400) == shared + 8
        while engine.has_unfinished_requests():
            engine.step()
        assert engine.stats().kv_usage == 0


def test_more_answers_than_may_run_at_once(tiny: Any, open_llm: Any, random_prompts: Any) -> None:
    llm, other = open_llm(tiny, scheduler={"max_num_seqs": 3}), open_llm(tiny)
    [prompt] = random_prompts([70])
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 12, "ignore_eos": True}
    [output] = llm.generate([prompt], SamplingParams(n=8, **fields))
    assert [a.token_ids for a in output.outputs] == alone(other, prompt, 8, **fields)


def test_in_a_pool_that_is_too_small(tiny: Any, open_llm: Any, random_prompts: Any) -> None:
    llm = open_llm(
        tiny, kv_cache={"num_blocks": 16, "block_size": 8}, scheduler={"max_num_batched_tokens": 40, "max_num_seqs": 9}
    )
    prompts = random_prompts([37, 50, 24], seed=3)
    fields: dict[str, Any] = {"temperature": 0.8, "seed": 2, "max_tokens": 40, "ignore_eos": True}
    outputs = llm.generate(prompts, SamplingParams(n=4, **fields))
    assert llm.stats().num_preemptions > 0
    other = open_llm(tiny)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert [a.token_ids for a in output.outputs] == alone(other, prompt, 4, **fields)
    llm.engine.client.core.scheduler.check_integrity()


@pytest.mark.parametrize("kind", list(OutputKind))
def test_streams_of_several_answers(tiny: Any, open_llm: Any, kind: OutputKind) -> None:
    engine = open_llm(tiny).engine
    params = SamplingParams(n=3, temperature=1, seed=5, max_tokens=30, output_kind=kind, logprobs=1)
    engine.add_request("x", "the world of water", params)
    texts, tokens, ended = {0: "", 1: "", 2: ""}, {0: 0, 1: 0, 2: 0}, []
    finished = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.request_id == "x"
            finished += output.finished
            for answer in output.outputs:
                delta = kind is OutputKind.DELTA
                texts[answer.index] = texts[answer.index] + answer.text if delta else answer.text
                tokens[answer.index] = tokens[answer.index] + len(answer.token_ids) if delta else len(answer.token_ids)
                ended += [answer.index] if delta and answer.finish_reason else []
            if kind is not OutputKind.DELTA:
                assert [a.index for a in output.outputs] == [0, 1, 2]
    assert finished == 1
    assert kind is not OutputKind.DELTA or sorted(ended) == [0, 1, 2]
    [whole] = open_llm(tiny).generate("the world of water", SamplingParams(n=3, temperature=1, seed=5, max_tokens=30))
    assert list(texts.values()) == [a.text for a in whole.outputs]
    assert list(tokens.values()) == [len(a.token_ids) for a in whole.outputs]


def test_an_abort_ends_all_of_them_in_every_phase(tiny: Any, open_llm: Any, random_prompts: Any) -> None:
    engine = open_llm(tiny, scheduler={"max_num_batched_tokens": 64}).engine
    [prompt] = random_prompts([150])
    for steps in range(8):
        engine.add_request("x", prompt, SamplingParams(n=6, temperature=1, max_tokens=20, ignore_eos=True))
        for _ in range(steps):
            engine.step()
        with pytest.raises(ValueError, match="'x' is still in use"):
            engine.add_request("x", prompt, SamplingParams())
        engine.abort_request("x")
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0)
        outputs = list(itertools.chain.from_iterable(engine.step() for _ in range(2)))
        assert [o.finished for o in outputs] == [True]
        assert {a.finish_reason for a in outputs[0].outputs} == {"abort"}
        assert not engine.has_unfinished_requests()
    engine.client.core.scheduler.check_integrity()


def test_one_answer_may_fail_alone() -> None:
    """The model's logits break down for one history, which only one answer has."""
    from pegboard import LLM
    from pegboard.testing.scripted_model import NAN

    def next_token(history: Any) -> int:
        return NAN if history[-1] == 66 else 97

    with LLM("scripted", plugins={"scripted": ScriptedPlugin(next_token)}, max_num_seqs=8) as llm:
        seeds = range(40)
        for seed in seeds:  # the first draw is nearly flat over 257 ids at this temperature
            params = SamplingParams(n=4, temperature=1e4, seed=seed, max_tokens=2, ignore_eos=True, allowed_token_ids=[65, 66])
            [output] = llm.generate("Hi", params)
            firsts = [a.token_ids[0] for a in output.outputs]
            if len(set(firsts)) == 2:
                break
        reasons = {first: a.finish_reason for first, a in zip(firsts, output.outputs, strict=True)}
        assert reasons == {65: "length", 66: "error"}
        assert all("finite" in str(a.stop_reason) for a in output.outputs if a.finish_reason == "error")


def test_prompt_logprobs_come_once(tiny: Any, open_llm: Any, random_prompts: Any) -> None:
    llm = open_llm(tiny)
    [prompt] = random_prompts([40])
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 5, "ignore_eos": True}
    [one] = llm.generate([prompt], SamplingParams(prompt_logprobs=2, **fields))
    llm.reset_prefix_cache()
    before = llm.stats().num_scheduled_tokens
    [several] = llm.generate([prompt], SamplingParams(n=4, prompt_logprobs=2, **fields))
    assert llm.stats().num_scheduled_tokens - before == 40 + 4 * 4
    assert several.prompt_logprobs == one.prompt_logprobs
    assert several.outputs[0].token_ids == one.outputs[0].token_ids
