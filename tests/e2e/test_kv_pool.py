"""A KV pool that is too small: what never fits, preemption, and prefix hits at block edges."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard import SamplingParams
from pegboard.plugins import hookimpl
from pegboard.plugins.provider import StatLoggerProvider

BLOCK = 16


@pytest.mark.parametrize("allocator", ["paged", "prefix"])
def test_a_prompt_that_can_never_fit_is_refused_and_holds_nobody_up(
    tiny: Any, open_llm: Any, greedy: Any, random_prompts: Any, allocator: str
) -> None:
    llm = open_llm(tiny, max_model_len=2048, kv_cache={"num_blocks": 20, "block_size": BLOCK, "allocator": allocator})
    usable = 20 * BLOCK
    for length in (usable - 1, usable, usable + 1, 1000):
        [prompt] = random_prompts([length], seed=length)
        if length <= usable:
            assert len(llm.generate([prompt], greedy(1))[0].outputs[0].token_ids) == 1
        else:
            with pytest.raises(ValueError, match=rf"KV cache holds {usable} \(20 blocks of 16\)"):
                llm.generate([prompt], greedy(1))
        assert len(llm.generate([[5, 6, 7]], greedy(3))[0].outputs[0].token_ids) == 3
    assert llm.stats().kv_usage == 0


def test_output_ends_where_the_pool_does(tiny: Any, open_llm: Any, greedy: Any, random_prompts: Any) -> None:
    llm = open_llm(tiny, kv_cache={"num_blocks": 4, "block_size": BLOCK})
    [output] = llm.generate(random_prompts([40]), greedy(None))
    assert len(output.outputs[0].token_ids) == 4 * BLOCK + 1 - 40
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("allocator", ["paged", "prefix"])
def test_preemption_does_not_thrash(
    tiny: Any, open_llm: Any, greedy: Any, random_prompts: Any, streams: Any, allocator: str
) -> None:
    prompts = random_prompts([150] * 8)
    scheduler = {"max_num_batched_tokens": 32, "max_num_seqs": 8}

    def run(num_blocks: int, together: bool) -> Any:
        llm = open_llm(tiny, scheduler=scheduler, kv_cache={"num_blocks": num_blocks, "allocator": allocator})
        running = streams(llm.engine)
        for i, prompt in enumerate(prompts):
            running.add(str(i), prompt, greedy(80))
            if not together:
                running.run()
        running.run()
        return running, llm

    ample, _ = run(400, together=True)
    alone, _ = run(400, together=False)
    tight, llm = run(37, together=True)  # 230 tokens are 15 blocks: room for two and a half
    assert llm.stats().num_preemptions >= 2
    assert max(s.last.metrics.num_preemptions for s in tight.all.values()) <= 10
    assert tight.step_number < 5 * alone.step_number
    for rid, stream in tight.all.items():
        assert (stream.tokens, stream.finish_reason) == (ample.all[rid].tokens, "length")


# Seeded rows draw among few tokens: between a thousand of them, rounding decides now and then.
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3, "top_k": 20},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.2},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.7, "seed": 5, "min_tokens": 30, "ignore_eos": False, "top_k": 20},
    {"temperature": 1.3, "seed": 6, "top_k": 20, "top_p": 0.9, "logprobs": 0},
    {"temperature": 0.0},  # gets a stop string that occurs late
]


def test_preempt_and_resume_do_not_change_the_output(tiny: Any, open_llm: Any, random_prompts: Any, streams: Any) -> None:
    prompts = random_prompts([60, 64, 71, 80, 48, 63, 55, 66])
    first_tokens: list[int] = []

    class Spy:
        @hookimpl
        def stat_loggers(self) -> Any:
            yield StatLoggerProvider(name="spy", target=lambda: _Logger(first_tokens))

    def run(num_blocks: int, late_stop: str | None) -> Any:
        llm = open_llm(tiny, kv_cache={"num_blocks": num_blocks}, plugins={"spy": Spy()}, observability={"stat_loggers": ["spy"]})
        first_tokens.clear()
        running = streams(llm.engine)
        for i, (prompt, fields) in enumerate(zip(prompts, PARAMS, strict=True)):
            stop = (late_stop,) if late_stop and i == 7 else ()
            running.add(str(i), prompt, SamplingParams(**{"max_tokens": 80, "ignore_eos": True, "stop": stop, **fields}))
        running.run()
        assert sum(first_tokens) == 8, "a first token was counted twice"
        return running.all, llm.stats().num_preemptions

    free, _ = run(400, None)
    text = free["7"].text
    late = next(text[i : i + 4] for i in range(len(text) // 2, len(text)) if text.find(text[i : i + 4]) == i)
    ample, none = run(400, late)
    tight, preemptions = run(12, late)
    assert (none, preemptions >= 5) == (0, True), f"{preemptions} preemptions"
    for rid, stream in tight.items():
        expected = ample[rid]
        assert stream.tokens == expected.tokens
        assert stream.text == expected.text
        assert (stream.finish_reason, stream.finals) == (expected.finish_reason, 1)
        assert len(stream.logprobs) == len(expected.logprobs)
        for ours, theirs in zip(stream.logprobs, expected.logprobs, strict=True):
            assert list(ours) == list(theirs)
            assert [p.logprob for p in ours.values()] == pytest.approx([p.logprob for p in theirs.values()], abs=1e-3)
    assert tight["7"].last.outputs[0].stop_reason == late
    assert tight["7"].text == text[: text.index(late)]


class _Logger:
    def __init__(self, first_tokens: list[int]) -> None:
        self._first_tokens = first_tokens

    def record(self, scheduler: Any, iteration: Any) -> None:
        self._first_tokens.append(len(iteration.time_to_first_token))

    def log(self) -> None: ...


def test_prefix_hits_at_block_edges(tiny: Any, open_llm: Any, greedy: Any, random_prompts: Any, reference: Any) -> None:
    cached = open_llm(tiny, kv_cache={"num_blocks": 400, "allocator": "prefix", "block_size": BLOCK})
    plain = open_llm(tiny, kv_cache={"num_blocks": 400, "allocator": "paged", "block_size": BLOCK})
    for length in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 3 * BLOCK):
        [prompt] = random_prompts([length], seed=length)
        [expected] = plain.generate([prompt], greedy(20))
        assert expected.num_cached_tokens == 0
        hits = []
        for _ in range(3):
            [output] = cached.generate([prompt], greedy(20))
            reference.check_same(prompt, output.outputs[0].token_ids, expected.outputs[0].token_ids)
            hits.append(output.num_cached_tokens)
        assert hits == [0] + [(length - 1) // BLOCK * BLOCK] * 2
        turn = prompt + expected.outputs[0].token_ids + [9]
        [output] = cached.generate([turn], greedy(5))
        assert output.num_cached_tokens == (length + 19) // BLOCK * BLOCK, "the answer's full blocks are hits too"
        [expected] = plain.generate([turn], greedy(5))
        reference.check_same(turn, output.outputs[0].token_ids, expected.outputs[0].token_ids)
