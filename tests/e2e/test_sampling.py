"""Sampling through the whole engine, against transformers' logits and numpy: seeds, temperatures, penalties, biases, ends."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from pegboard import LLMEngine, SamplingParams
from pegboard.testing.checkpoints import make_checkpoint

CLOSE = 2e-3


# -- seeds -------------------------------------------------------------------------------------------------------------

SEEDED = SamplingParams(temperature=0.9, seed=11, max_tokens=24, ignore_eos=True)


def test_a_seeded_request_is_repeatable_whatever_else_is_in_the_batch(
    tiny: Any, open_llm: Any, random_prompts: Any, streams: Any
) -> None:
    [prompt, other] = random_prompts([30, 50], seed=41)
    unseeded = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
    engine: LLMEngine = open_llm(tiny, scheduler={"max_num_batched_tokens": 64}).engine
    neighbours: list[list[int]] = []

    def run(before: list[SamplingParams] = (), after: list[SamplingParams] = (), late: int = 0, leaves: int = 0) -> list[int]:  # type: ignore[assignment]
        running = streams(engine)
        for i, params in enumerate(before):
            running.add(f"before-{i}", other, params)
        for _ in range(late):
            running.step()
        stream = running.add("R", prompt, SEEDED)
        for i, params in enumerate(after):
            running.add(f"after-{i}", other, params)
        if leaves:
            for _ in range(leaves):
                running.step()
            engine.abort_request(["before-0", "after-0"])
        running.run()
        neighbours.extend(s.tokens[:8] for r, s in running.all.items() if r != "R")
        return stream.tokens

    alone = run()
    assert len(set(alone)) > 5
    seeded = [SamplingParams(temperature=1.2, seed=s, max_tokens=40, ignore_eos=True) for s in (0, -1, 2**63)]
    runs = [
        run(before=[unseeded]), run(after=[unseeded]), run(before=seeded), run(after=seeded), run(before=[unseeded], late=9),
        run(before=[unseeded], leaves=7), run(after=[unseeded], leaves=3), run(before=[unseeded, *seeded], after=[unseeded]),
        run(),
    ]  # fmt: skip
    assert all(tokens == alone for tokens in runs)
    drawn = [tuple(tokens) for tokens in neighbours]
    seeds = {tuple(t) for t in drawn if drawn.count(t) > 1}
    assert len(seeds) == 3, "seeded neighbours repeat, unseeded ones don't"


@pytest.mark.parametrize("options", [
    {"scheduler": {"max_num_batched_tokens": 7, "max_num_seqs": 7}},
    {"kv_cache": {"num_blocks": 14, "block_size": 8}},
    {"kv_cache": {"num_blocks": 400, "allocator": "paged"}},
    {"seed": 77},
])  # fmt: skip
def test_a_seeded_request_does_not_depend_on_chunks_preemption_or_the_engine_s_seed(
    tiny: Any, open_llm: Any, random_prompts: Any, options: dict[str, Any]
) -> None:
    prompts = random_prompts([30, 33, 36], seed=42)
    params = [SamplingParams(temperature=0.9, seed=s, max_tokens=60, ignore_eos=True) for s in (1, 2, 3)]
    expected = [o.outputs[0].token_ids for o in open_llm(tiny).generate(prompts, params)]
    llm = open_llm(tiny, **options)
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == expected
    if "kv_cache" in options and options["kv_cache"]["num_blocks"] == 14:
        assert llm.stats().num_preemptions > 0


def test_unseeded_requests_differ_and_a_seeded_engine_repeats_itself(tiny: Any, open_llm: Any, random_prompts: Any) -> None:
    [prompt] = random_prompts([12])
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)

    def answers(**options: Any) -> list[tuple[int, ...]]:
        return [tuple(o.outputs[0].token_ids) for o in open_llm(tiny, **options).generate([prompt] * 4, params)]

    first, second = answers(), answers()
    assert len({*first, *second}) == 8
    assert answers(seed=5) == answers(seed=5) != answers(seed=6)


def test_an_id_that_is_used_again_draws_anew(tiny: Any, open_llm: Any, streams: Any) -> None:
    engine = open_llm(tiny, seed=0).engine
    drawn = set()
    for _ in range(5):
        running = streams(engine)
        stream = running.add("x", [5, 6, 7], SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True))
        running.run()
        drawn.add(tuple(stream.tokens))
    assert len(drawn) == 5


# -- temperature -------------------------------------------------------------------------------------------------------

FILTERS: list[dict[str, Any]] = [{}, {"top_p": 0.5}, {"top_k": 7}, {"min_p": 0.3}, {"top_p": 0.9, "top_k": 50, "min_p": 0.01}]


def test_tiny_temperatures_are_greedy_alone_and_in_one_batch(
    tiny: Any, open_llm: Any, random_prompts: Any, reference: Any
) -> None:
    llm = open_llm(tiny)
    [prompt] = random_prompts([40], seed=46)
    [greedy] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    kinds = [
        SamplingParams(temperature=t, seed=i, max_tokens=16, ignore_eos=True, logprobs=2, **f)
        for i, (t, f) in enumerate(itertools.product((0, 1e-12, 1e-6, 1e-4, 1e-2), FILTERS))
    ]
    together = llm.generate([prompt] * len(kinds), kinds)
    alone = [llm.generate([prompt], params)[0] for params in kinds[:: len(FILTERS)]]
    for output, params in zip(together + alone, kinds + kinds[:: len(FILTERS)], strict=True):
        answer = output.outputs[0]
        assert answer.text
        if params.temperature <= 1e-4:
            assert (answer.token_ids, answer.text) == (greedy.outputs[0].token_ids, greedy.text)
        else:  # equal wherever the best token is clearly ahead of the second
            reference.check_same(prompt, answer.token_ids, greedy.outputs[0].token_ids)
        assert all(np.isfinite(entry.logprob) for d in answer.logprobs or () for entry in d.values())


# -- penalties, bias, bad words ------------------------------------------------------------------------------------------


def penalised(logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams) -> np.ndarray:
    """The three penalties as their definitions have them, one token at a time."""
    changed = logits.copy()
    for token in {*prompt, *output}:
        changed[token] *= params.repetition_penalty if changed[token] < 0 else 1 / params.repetition_penalty
    for token in set(output):
        changed[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return changed


PENALTIES: list[dict[str, Any]] = [
    {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 2.0}, {"presence_penalty": -2.0},
    {"frequency_penalty": -2.0}, {"repetition_penalty": 0.5},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
]  # fmt: skip


def test_penalties_look_at_the_tokens_that_they_should(tiny: Any, open_llm: Any, random_prompts: Any, reference: Any) -> None:
    """Greedy under penalties is the argmax of the reference's logits under the definition, step by step, in a batch with much
    longer prompts."""
    llm = open_llm(tiny)
    [base, *longer] = random_prompts([20, 400, 700], seed=45)
    prompt = [*base, *[base[3]] * 10]
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, **fields) for fields in PENALTIES]
    filler = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, presence_penalty=2)] * 2
    outputs = llm.generate([prompt] * len(params) + longer, params + filler)
    for output, one in zip(outputs, params, strict=False):
        tokens = output.outputs[0].token_ids
        raw = reference.logits(prompt, tokens)
        for step, token in enumerate(tokens):
            wanted = penalised(raw[step], prompt, tokens[:step], one)
            assert wanted[token] >= wanted.max() - CLOSE, f"{one}: token {step}"


def test_penalties_change_what_is_said(tiny: Any, open_llm: Any, random_prompts: Any) -> None:
    llm = open_llm(tiny)
    [prompt] = random_prompts([20], seed=45)
    params = [
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, **fields)
        for fields in ({}, {"frequency_penalty": -2.0}, {"repetition_penalty": 2.0})
    ]
    said = {tuple(output.outputs[0].token_ids) for output in llm.generate([prompt] * 3, params)}
    assert len(said) == 3


def test_bias_and_allowed_ids_decide(tiny: Any, open_llm: Any, random_prompts: Any, reference: Any) -> None:
    llm = open_llm(tiny)
    [prompt] = random_prompts([25], seed=47)
    base = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    allowed = (5, 77, 500, 999)
    forced, kept, mild, plain = llm.generate(
        [prompt] * 4,
        [
            SamplingParams(**base, logit_bias={123: 100}),
            SamplingParams(**base, allowed_token_ids=allowed),
            SamplingParams(**base, logit_bias=dict.fromkeys(range(0, 1000, 2), 3.0)),
            SamplingParams(**base),
        ],
    )
    assert forced.outputs[0].token_ids == [123] * 12
    for output, change in ((kept, None), (mild, 3.0), (plain, 0.0)):
        tokens = output.outputs[0].token_ids
        for row, token in zip(reference.logits(prompt, tokens), tokens, strict=True):
            if change is None:
                assert token in allowed
                assert row[token] >= row[list(allowed)].max() - CLOSE
            else:
                row[::2] += change
                assert row[token] >= row.max() - CLOSE


# -- the end -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("min_tokens", [0, 1, 3, 7])
@pytest.mark.parametrize("which", [0, 1])
def test_min_tokens_holds_back_every_end_of_sequence_id(tmp_path: Any, open_llm: Any, min_tokens: int, which: int) -> None:
    eos = [0, 4]
    llm = open_llm(make_checkpoint(tmp_path, generation_config={"eos_token_id": eos}))
    params = SamplingParams(temperature=0, min_tokens=min_tokens, max_tokens=24, logit_bias={eos[which]: 100})
    [output] = llm.generate([[50, 60, 70]], params)
    answer = output.outputs[0]
    assert len(answer.token_ids) == min_tokens + 1
    assert answer.token_ids[-1] == eos[which]
    assert not {*answer.token_ids[:-1]} & {*eos}
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


def test_a_stop_string_does_not_count_before_min_tokens(tiny: Any, open_llm: Any) -> None:
    llm = open_llm(tiny)
    [newline] = llm.get_tokenizer().encode("\n")
    params = SamplingParams(temperature=0, min_tokens=20, max_tokens=40, stop="\n", logit_bias={newline: 100})
    [output] = llm.generate([[50, 60, 70]], params)
    assert len(output.outputs[0].token_ids) == 20
    assert (output.text, output.outputs[0].finish_reason) == ("\n" * 19, "stop")
    with pytest.raises(ValueError, match="min_tokens=17 is larger than max_tokens=16"):
        SamplingParams(min_tokens=17)


def test_ignore_eos_goes_on(tiny: Any, open_llm: Any) -> None:
    [output] = open_llm(tiny).generate(
        [[50, 60, 70]], SamplingParams(temperature=0, ignore_eos=True, max_tokens=9, logit_bias={0: 100})
    )
    assert output.outputs[0].token_ids == [0] * 9
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("bad", [-1, 1000, 2000, 2**31, 2**63, 1.5, "x", True])
def test_bad_ids_anywhere_harm_nobody(tiny: Any, open_llm: Any, streams: Any, bad: Any) -> None:
    engine = open_llm(tiny).engine
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=8, ignore_eos=True)
    alone = streams(engine)
    expected = alone.add("neighbour", [5, 6, 7], params)
    alone.run()
    running = streams(engine)
    stream = running.add("neighbour", [5, 6, 7], params)
    running.step()
    fields: list[dict[str, Any]] = [{"logit_bias": {bad: 1.0}}, {"allowed_token_ids": [bad]}, {"stop_token_ids": [bad]}]
    fields.append({"stop_token_ids": [bad], "min_tokens": 1})
    for field in fields:
        with pytest.raises(ValueError, match=next(iter(field))) as error:
            engine.add_request("bad", [5], SamplingParams(**field))
        assert str(bad) in str(error.value)
    running.run()
    assert stream.tokens == expected.tokens
