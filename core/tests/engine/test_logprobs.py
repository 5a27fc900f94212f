"""Log probabilities of outputs and prompts as a caller gets them, echo, and the form of the completions API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pegboard.engine.completion_logprobs import CompletionLogprobs, completion_logprobs
from pegboard.engine.llm_engine import LLMEngine
from pegboard.engine.outputs import Logprob, OutputKind, RequestOutput
from pegboard.engine.token_names import TokenNames, named_logprobs
from pegboard.testing.scripted_model import ByteTokenizer
from pegboard.wire import Logprobs, SamplingParams


def ask(engine: LLMEngine, prompt: Any = "hi", kind: OutputKind = OutputKind.FINAL, **params: Any) -> list[RequestOutput]:
    engine.add_request("x", prompt, SamplingParams(**{"max_tokens": 40, **params}), kind=kind)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


# -- the prompt's --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(OutputKind))
def test_prompt_logprobs_begin_with_none_and_have_an_entry_per_token(make_engine: Any, kind: OutputKind) -> None:
    for output in ask(make_engine({"x": "ab"}), "hint", kind, prompt_logprobs=2):
        assert output.prompt_logprobs is not None
        first, *others = output.prompt_logprobs
        assert first is None
        assert [list(entry) for entry in others if entry] == [[9, 5, 6], [14, 5, 6], [20, 5, 6]]
        assert others[0] is not None
        assert [(p.logprob, p.rank, p.decoded_token) for p in others[0].values()] == [
            (-1.5, 2, "i"),
            (-0.5, 1, "e"),
            (-2.0, 3, "f"),
        ]
        assert output.outputs[0].logprobs is None


def test_they_are_there_only_when_asked_for_also_for_one_token(make_engine: Any) -> None:
    engine = make_engine({"x": "ab"})
    assert ask(engine)[0].prompt_logprobs is None
    assert ask(engine, [5], prompt_logprobs=0)[0].prompt_logprobs == [None]


@pytest.mark.parametrize("kind", list(OutputKind))
def test_with_several_answers_the_first_brings_them_and_all_wait_for_them(
    make_engine: Any, kind: OutputKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine({"x#0": "ab", "x#1": "xyz"})
    scheduler = engine.client.core.scheduler
    schedule = scheduler.schedule
    steps = []

    def late() -> Any:  # the first answer begins two steps after the other
        steps.append(1)
        [first, *_] = engine.core_ids("x") or [None]
        if len(steps) <= 2:
            scheduler.busy.add(first)
        elif len(steps) == 3:
            scheduler.busy.discard(first)
        return schedule()

    monkeypatch.setattr(scheduler, "schedule", late)
    outputs = ask(engine, "hi", kind, n=2, prompt_logprobs=1)
    assert all(o.prompt_logprobs is not None for o in outputs)
    if kind is OutputKind.DELTA:
        assert [[a.text for a in o.outputs] for o in outputs] == [["a", "xyz"], ["b", ""], [""]]
    assert {a.index: a.finish_reason for o in outputs for a in o.outputs} == {0: "stop", 1: "stop"}


def test_a_request_that_ends_before_they_are_known_has_none(make_engine: Any) -> None:
    engine = make_engine({"x": "ab"})
    engine.add_request("x", "hi", SamplingParams(n=2, prompt_logprobs=1), kind=OutputKind.DELTA)
    engine.abort_request("x")
    [output] = engine.step()
    assert output.prompt_logprobs is None
    assert [a.finish_reason for a in output.outputs] == ["abort", "abort"]
    [output] = ask(make_engine({"x": ["not a number"]}), prompt_logprobs=1)
    assert (output.prompt_logprobs, output.outputs[0].finish_reason) == (None, "error")


# -- names ---------------------------------------------------------------------------------------------------------------


def test_names_of_tokens_that_are_parts_of_characters() -> None:
    names = TokenNames(ByteTokenizer())
    entry = named_logprobs(Logprobs([0xF0, 0x41, 256, 999], [-3.0, -1.0, -2.0, -4.0], 3), names)
    assert entry == {
        0xF0: Logprob(-3.0, 3, "bytes:\\xf0", b"\xf0"),
        0x41: Logprob(-1.0, 1, "A", b"A"),
        256: Logprob(-2.0, 2, "<eos>", None),
        999: Logprob(-4.0, 4, "", None),
    }


@pytest.mark.parametrize(("rank", "others"), [(1, [2, 3]), (2, [1, 3]), (3, [1, 2]), (9, [1, 2, 3])])
def test_ranks_leave_out_the_chosen_one(rank: int, others: list[int]) -> None:
    ids = list(range(len(others) + 1))
    entry = named_logprobs(Logprobs(ids, [0.0] * len(ids), rank), None)
    assert [p.rank for p in entry.values()] == [rank, *others]
    assert entry[0].decoded_token is None


def test_without_detokenization_the_tokenizer_has_nothing_to_do(make_engine: Any, letters: Any) -> None:
    class Idle(letters):  # type: ignore[misc, valid-type]
        def decode(self, *_: Any, **__: Any) -> str:
            raise AssertionError("decoded")

        token_text = token_bytes = decode

    engine = make_engine({"x": "hello"}, tokenizer=Idle())
    for kind in OutputKind:
        outputs = ask(engine, "hi", kind, detokenize=False, logprobs=1, prompt_logprobs=1, n=2, stop_token_ids=[5])
        assert all(a.text == "" for o in outputs for a in o.outputs)
        assert outputs[-1].finished
        last = outputs[-1].outputs[0]
        assert (last.finish_reason, last.stop_reason) == ("stop", 5)
    assert len(outputs[-1].outputs[0].token_ids) == 2
    entry = outputs[-1].outputs[0].logprobs[0]  # type: ignore[index]
    assert [p.decoded_token for p in entry.values()] == [None] * 3
    assert outputs[-1].outputs[0].text_offsets == [0, 0]


# -- echo ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(OutputKind))
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", ["hint", [8, 9, 14, 20]])
def test_echo_puts_the_prompt_before_each_answer_once(make_engine: Any, kind: OutputKind, n: int, prompt: Any) -> None:
    outputs = ask(make_engine({"x#0": "abc", "x#1": "xyz", "x": "abc"}), prompt, kind, n=n, echo=True)
    joined = [""] * n
    for output in outputs:
        assert output.echo is not None
        assert output.echo.text == "hint"
        for answer in output.outputs:
            delta = kind is OutputKind.DELTA
            joined[answer.index] = joined[answer.index] + answer.text if delta else answer.text
            assert answer.with_prompt == answer.text.startswith("hint")
    assert joined == ["hintabc", "hintxyz"][:n]
    assert [len(a.token_ids) for a in outputs[-1].outputs] == ([1] if kind is OutputKind.DELTA else [4]) * n


def test_stop_strings_are_not_looked_for_in_the_prompt(make_engine: Any) -> None:
    for stop, text in (("in", "hintab"), ("ta", "hintab"), ("b", "hinta"), ("hintab", "hintab")):
        [output] = ask(make_engine({"x": "ab"}), "hint", echo=True, stop=stop)
        assert (output.text, output.outputs[0].stop_reason) == (text, "b" if stop == "b" else None)


def test_echo_of_a_prompt_that_was_cut_shows_what_was_kept(make_engine: Any) -> None:
    [output] = ask(make_engine({"x": "ab"}), "hint", echo=True, truncate_prompt_tokens=2)
    assert (output.text, output.prompt, output.prompt_token_ids) == ("ntab", "hint", [14, 20])


def test_echo_of_an_answer_that_never_began(make_engine: Any) -> None:
    engine = make_engine({"x": "ab"})
    engine.add_request("x", "hint", SamplingParams(echo=True), kind=OutputKind.DELTA)
    engine.abort_request("x")
    assert [o.text for o in engine.step()] == ["hint"]


# -- the completions format ----------------------------------------------------------------------------------------------


def test_completion_logprobs_of_an_answer(make_engine: Any) -> None:
    [output] = ask(make_engine({"x": "ae"}), logprobs=2, ignore_eos=True, max_tokens=2)
    listed = completion_logprobs(output, output.outputs[0])
    assert listed == CompletionLogprobs(
        tokens=["a", "e"],
        token_logprobs=[-1.5, -0.5],
        top_logprobs=[{"e": -0.5, "a": -1.5, "f": -2.0}, {"e": -0.5, "f": -2.0}],
        text_offset=[0, 1],
    )
    assert json.dumps([listed.tokens, listed.token_logprobs, listed.top_logprobs, listed.text_offset])


def test_completion_logprobs_of_an_echo_begin_with_the_prompt_s(make_engine: Any) -> None:
    engine = make_engine({"x": "ab"})
    [output] = ask(engine, "hi", echo=True, logprobs=1, prompt_logprobs=1)
    listed = completion_logprobs(output, output.outputs[0], echo=True)
    assert listed.tokens == ["h", "i", "a", "b", "<eos>"]
    assert listed.token_logprobs == [None, -1.5, -1.5, -1.5, -1.5]
    assert listed.top_logprobs[0] is None
    assert listed.text_offset == [0, 1, 2, 3, 4]
    assert completion_logprobs(output, output.outputs[0]).text_offset == [2, 3, 4], "into the text as it is"
    [output] = ask(engine, "hi", echo=True, logprobs=1)
    assert completion_logprobs(output, output.outputs[0], echo=True).tokens == ["a", "b", "<eos>"]


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_says_the_same_as_the_whole(make_engine: Any, n: int) -> None:
    engine = make_engine({"x#0": "ab<x>", "x#1": "xyz", "x": "ab<x>"})
    fields: dict[str, Any] = {"n": n, "echo": True, "logprobs": 2, "prompt_logprobs": 1, "stop": "<x>"}
    [whole] = ask(engine, "hi", **fields)
    pieces = [CompletionLogprobs() for _ in range(n)]
    for output in ask(engine, "hi", OutputKind.DELTA, **fields):
        for answer in output.outputs:
            pieces[answer.index].extend(completion_logprobs(output, answer, echo=True))
    for i, piece in enumerate(pieces):
        listed = completion_logprobs(whole, whole.outputs[i], echo=True)
        assert (piece.tokens, piece.token_logprobs, piece.top_logprobs) == (
            listed.tokens,
            listed.token_logprobs,
            listed.top_logprobs,
        )
        length = len(whole.outputs[i].text)
        assert [min(o, length) for o in piece.text_offset] == listed.text_offset


def test_offsets_index_text_with_characters_of_several_tokens(make_engine: Any) -> None:
    text = "é🙂 a漢"
    engine = make_engine({"x": [*text.encode(), 256]}, tokenizer=ByteTokenizer(), vocab_size=257)
    [output] = ask(engine, "🙂b", echo=True, logprobs=0, prompt_logprobs=0)
    assert output.text == "🙂b" + text
    listed = completion_logprobs(output, output.outputs[0], echo=True)
    assert listed.text_offset == [0, 0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 4, 5, 6, 6, 6, 7]
    assert listed.tokens[0] == "bytes:\\xf0"
    assert listed.tokens[4] == "b"
    for token, offset in zip(listed.tokens, listed.text_offset, strict=True):
        assert token.startswith(("bytes:", "<")) or output.text[offset:].startswith(token)


def test_offsets_after_characters_that_break_off(make_engine: Any) -> None:
    said = [0xF0, 0x9F, 0x41, 0xE6, 0xE6, 0xBC, 0xA2, 0x42, 0xF0]
    engine = make_engine({"x": said}, tokenizer=ByteTokenizer(), vocab_size=257)
    [output] = ask(engine, [65], logprobs=0, max_tokens=9)
    assert output.text == "\ufffdA\ufffd漢B\ufffd"
    assert output.outputs[0].text_offsets == [0, 0, 1, 2, 3, 3, 3, 4, 5]


def test_offsets_of_what_a_stop_string_cuts_off_stay_in_the_text(make_engine: Any) -> None:
    for include, offsets in ((False, [0, 1, 2, 2, 2]), (True, [0, 1, 2, 3, 4])):
        [output] = ask(make_engine({"x": "ab<x>c"}), logprobs=0, stop="<x>", include_stop_str_in_output=include)
        assert output.outputs[0].text_offsets == offsets


def test_of_tokens_with_one_name_the_likeliest_counts() -> None:
    entry = {7: Logprob(-3.0, 9, "a"), 8: Logprob(-1.0, 1, "a"), 9: Logprob(-2.0, 2, "b")}
    from pegboard.engine.outputs import CompletionOutput

    completion = CompletionOutput(0, "a", [7], logprobs=[entry], text_offsets=[0])
    output = RequestOutput("x", None, [1], [completion], True)
    assert completion_logprobs(output, completion).top_logprobs == [{"a": -1.0, "b": -2.0}]
    assert completion_logprobs(output, completion).token_logprobs == [-3.0]
