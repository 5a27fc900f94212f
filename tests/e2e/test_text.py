"""Text through the whole engine: stop strings, characters that span tokens, bad words, echo, special tokens."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from pegboard import LLM, LLMEngine, OutputKind, RequestOutput, SamplingParams
from pegboard.engine.completion_logprobs import completion_logprobs
from pegboard.testing.scripted_model import ScriptedPlugin, text_model

PROMPT = [50, 60, 70]


def stream(engine: LLMEngine, prompt: Any, params: SamplingParams) -> list[RequestOutput]:
    """All pieces of one request."""
    engine.add_request("s", prompt, params, kind=OutputKind.DELTA)
    pieces = []
    while engine.has_unfinished_requests():
        pieces += engine.step()
    assert [p.finished for p in pieces] == [False] * (len(pieces) - 1) + [True]
    return pieces


# -- stop strings --------------------------------------------------------------------------------------------------------


def stops_of(text: str, ends: list[int]) -> Iterator[tuple[str, ...]]:
    """Stop strings that occur in ``text``: from the middle of a token to the middle of another, over 2, 3 and 5 tokens, alone and
    with one that is its beginning."""
    for first, count in itertools.product((3, 9, 15), (2, 3, 5)):
        begin, end = ends[first] - 1, ends[first + count] - 1
        piece = text[begin:end]
        if len(piece) > 1:
            yield (piece,)
            yield (piece, piece[: len(piece) // 2 + 1])
            yield (piece[:-1], piece)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_several_tokens_never_shows(tiny: Any, open_llm: Any, include: bool) -> None:
    llm = open_llm(tiny)
    base: dict[str, Any] = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    [plain] = llm.generate([PROMPT], SamplingParams(**base))
    tokens, text = plain.outputs[0].token_ids, plain.text
    decode = llm.get_tokenizer().decode
    ends = [len(decode(tokens[: i + 1])) for i in range(len(tokens))]
    tried = 0
    for stops in stops_of(text, ends):
        params = SamplingParams(**base, stop=stops, include_stop_str_in_output=include)
        finish = {s: text.index(s) + len(s) for s in stops}  # the one that is complete first
        first = min(finish.values())
        matched = max((s for s in stops if finish[s] == first), key=len)
        expected = text[: first if include else first - len(matched)]
        [whole] = llm.generate([PROMPT], params)
        pieces = stream(llm.engine, PROMPT, params)
        joined = "".join(p.text for p in pieces)
        assert whole.text == joined == expected
        assert all(expected.startswith("".join(p.text for p in pieces[: i + 1])) for i in range(len(pieces)))
        for answer in (whole.outputs[0], pieces[-1].outputs[0]):
            assert (answer.finish_reason, answer.stop_reason) == ("stop", matched)
        needed = next(i for i, end in enumerate(ends) if end >= first) + 1
        assert len(whole.outputs[0].token_ids) <= needed + 1, "it stops within one token of the match"
        tried += 1
    assert tried >= 18


# -- characters ----------------------------------------------------------------------------------------------------------

HARD = "\U0001f642\U0001f469\u200d\U0001f469\u200d\U0001f467 안녕하세요 नमस्ते e\u0301 \u200d 漢字, then ASCII. é"


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Says ``HARD`` one byte per token, through the real worker."""
    with LLM("scripted", plugins={"scripted": ScriptedPlugin(text_model({"Say": HARD}))}, max_num_seqs=4) as llm:
        yield llm


def test_no_piece_holds_half_a_character(speaker: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=200)
    pieces = [p.text for p in stream(speaker.engine, "Say", params)]
    assert "".join(pieces) == HARD == speaker.generate("Say", params)[0].text
    assert not any("\ufffd" in piece for piece in pieces)
    assert all(piece.encode() for piece in pieces if piece)
    together = speaker.generate(["Say"] * 4, params)
    assert {o.text for o in together} == {HARD}


def test_a_stop_string_right_after_an_emoji(speaker: LLM) -> None:
    for stop in ("\U0001f469\u200d\U0001f467", "\u200d\U0001f467", " 안", "नमस्ते", "e\u0301"):
        pieces = stream(speaker.engine, "Say", SamplingParams(temperature=0, max_tokens=200, stop=stop))
        assert "".join(p.text for p in pieces) == HARD[: HARD.index(stop)]
        assert pieces[-1].outputs[0].stop_reason == stop


def test_an_answer_cut_in_a_character_ends_as_decode_ends(speaker: LLM) -> None:
    for max_tokens in range(1, 40):
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        pieces = stream(speaker.engine, "Say", params)
        expected = HARD.encode()[:max_tokens].decode(errors="replace")
        assert "".join(p.text for p in pieces) == expected


def test_without_text(tiny: Any, open_llm: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, detokenize=False, logprobs=1)
    [output] = open_llm(tiny).generate([PROMPT], params)
    assert (output.text, len(output.outputs[0].token_ids)) == ("", 9)


def test_special_tokens_are_shown_on_demand(tiny: Any, open_llm: Any) -> None:
    llm = open_llm(tiny)
    base: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "ignore_eos": True, "logit_bias": {2: 100}}
    hidden, shown = llm.generate([PROMPT] * 2, [SamplingParams(**base), SamplingParams(**base, skip_special_tokens=False)])
    assert (hidden.text, shown.text) == ("", "<|im_start|>" * 3)


# -- bad words -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("form", ["{}", " {}"])
def test_bad_words_appear_neither_at_the_start_nor_after_a_space(form: str) -> None:
    prompt = "The capital of France is"
    with LLM("smollm2", dtype="float32", kv_cache={"num_blocks": 64}) as llm:
        base: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
        [plain] = llm.generate(prompt, SamplingParams(**base))
        assert plain.text.startswith(" Paris.\n\nThe answer")
        word, bad = "Paris", [form.format("Paris")]
        [without, neighbour] = llm.generate([prompt] * 2, [SamplingParams(**base, bad_words=bad), SamplingParams(**base)])
        assert word not in without.text
        assert neighbour.text == plain.text, "no effect on other rows"
        [start] = llm.generate(prompt, SamplingParams(**base, bad_words=[form.format("The")]))
        assert start.text.startswith(" Paris.\n\n")
        assert "The" not in start.text, "it began a line, without a space before it"
        [whole] = llm.generate(prompt, SamplingParams(**base, bad_words=[form.format("The answer")]))
        assert whole.text.startswith(" Paris.\n\nThe "), "the first word alone is allowed"
        assert "The answer" not in whole.text
        many = [f"word{i}" for i in range(199)] + [word]
        assert word not in llm.generate(prompt, SamplingParams(**base, bad_words=many))[0].text


def test_a_phrase_that_overlaps_itself(tiny: Any, open_llm: Any) -> None:
    llm = open_llm(tiny)
    [z] = llm.get_tokenizer().encode("z")
    base: dict[str, Any] = {"temperature": 0, "max_tokens": 9, "ignore_eos": True, "logit_bias": {z: 100}}
    assert llm.get_tokenizer().encode("zzz") == [z] * 3
    [plain, output] = llm.generate([PROMPT] * 2, [SamplingParams(**base), SamplingParams(**base, bad_words=["zzz"])])
    assert plain.outputs[0].token_ids == [z] * 9
    assert [token == z for token in output.outputs[0].token_ids] == [True, True, False] * 3


def test_bad_words_that_are_none_are_refused(tiny: Any, open_llm: Any) -> None:
    for bad in ([""], [5], ["ok", ""]):
        with pytest.raises(ValueError, match="bad_words"):
            open_llm(tiny).generate([PROMPT], SamplingParams(bad_words=bad))


# -- echo and the completions format ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo(tiny: Any, open_llm: Any, logprobs: int | None, n: int, as_ids: bool) -> None:
    llm = open_llm(tiny)
    text = "the capital of France 漢"
    prompts: Any = [llm.get_tokenizer().encode(text), [50, 60, 70]] if as_ids else [text, "world"]
    shown = [text, llm.get_tokenizer().decode([50, 60, 70]) if as_ids else "world"]
    base: dict[str, Any] = {"n": n, "temperature": 1.0, "seed": 3, "max_tokens": 10, "logprobs": logprobs}
    plain = llm.generate(prompts, SamplingParams(**base))
    echoed = llm.generate(prompts, SamplingParams(**base, echo=True, prompt_logprobs=logprobs))
    for before, after, prompt in zip(plain, echoed, shown, strict=True):
        assert [a.text for a in after.outputs] == [prompt + a.text for a in before.outputs]
        assert [a.token_ids for a in after.outputs] == [a.token_ids for a in before.outputs], "usage is unchanged"
        for answer in after.outputs if logprobs is not None else ():
            listed = completion_logprobs(after, answer, echo=True)
            assert len(listed.tokens) == len(after.prompt_token_ids) + len(answer.token_ids)
            assert (listed.token_logprobs[0], listed.top_logprobs[0]) == (None, None)
            assert all(isinstance(value, float) for value in listed.token_logprobs[1:])
            assert listed.text_offset == sorted(listed.text_offset)
            for token, offset in zip(listed.tokens, listed.text_offset, strict=True):
                if token and not token.startswith(("bytes:", "<|")):
                    assert answer.text[offset:].startswith(token)
            assert json.dumps([listed.tokens, listed.token_logprobs, listed.top_logprobs, listed.text_offset])
    pieces = stream(llm.engine, prompts[0], SamplingParams(**{**base, "n": 1}, echo=True))
    assert "".join(p.text for p in pieces) == echoed[0].text
    assert sum(p.text.count(text) for p in pieces) == 1


# -- tenants ---------------------------------------------------------------------------------------------------------------


def test_a_cache_salt_isolates_tenants(tiny: Any, open_llm: Any, random_prompts: Any) -> None:
    llm = open_llm(tiny)
    [prompt] = random_prompts([100])
    outputs = [
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=5, cache_salt=salt))[0]
        for salt in ("a", "a", "b", None, None)
    ]
    assert [o.num_cached_tokens for o in outputs] == [0, 96, 0, 0, 96]
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    for bad in ("", 5, b"a"):
        with pytest.raises(ValueError, match="cache_salt"):
            SamplingParams(cache_salt=bad)
        with pytest.raises(ValueError, match="cache_salt"):
            llm.generate([{"prompt_token_ids": prompt, "cache_salt": bad}], SamplingParams())
