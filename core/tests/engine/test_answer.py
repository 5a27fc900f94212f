"""One answer: which tokens show, what ends it, what each report holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pegboard.engine.answer import Answer
from pegboard.engine.token_names import TokenNames
from pegboard.wire import EngineCoreOutput, EngineCoreRequest, FinishReason, Logprobs, SamplingParams

EOS = 0


@pytest.fixture
def make(letters: Any) -> Any:
    def make(tokenizer: Any = None, prompt_text: str | None = None, **params: Any) -> Answer:
        tokenizer = tokenizer or letters()
        request = EngineCoreRequest(
            request_id="x",
            prompt_token_ids=[1],
            sampling=SamplingParams(seed=1, **params),
            stop_token_ids=[EOS, *params.get("stop_token_ids", ())],
            max_tokens=100,
            arrival_time=0.0,
        )
        return Answer(request, 0, tokenizer, TokenNames(tokenizer), prompt_text)

    return make


def news(*token_ids: int, **fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id="x", new_token_ids=list(token_ids), **fields)


def test_the_token_that_ends_an_answer_is_hidden(make: Any) -> None:
    answer = make(stop_token_ids=(5,))
    answer.take(news(1), 0.0)
    answer.take(news(2, 5, finish_reason=FinishReason.STOP, stop_reason=5), 1.0)
    report = answer.report(False)
    assert (report.text, report.token_ids, report.stop_reason) == ("ab", [1, 2, 5], 5)


def test_a_language_that_ends_shows_its_last_token(make: Any) -> None:
    """A grammar ends an answer without an end-of-sequence token."""
    answer = make()
    answer.take(news(1, 2, finish_reason=FinishReason.STOP), 0.0)
    assert (answer.report(False).text, answer.stop_reason) == ("ab", None)


def test_the_last_token_at_a_limit_shows(make: Any) -> None:
    answer = make()
    answer.take(news(1, 2, finish_reason=FinishReason.LENGTH), 0.0)
    assert answer.report(False).text == "ab"


@pytest.mark.parametrize(("include", "text"), [(True, "a<eos>"), (False, "a")])
def test_a_stop_token_shows_on_demand(make: Any, include: bool, text: str) -> None:
    answer = make(include_stop_str_in_output=include, skip_special_tokens=False)
    answer.take(news(1, EOS, finish_reason=FinishReason.STOP, stop_reason=EOS), 0.0)
    assert answer.report(False).text == text


@pytest.mark.parametrize(("spaces", "text"), [(True, "a <eos> <eos>b"), (False, "a <eos><eos>b")])
def test_spaces_between_special_tokens(make: Any, letters: Any, spaces: bool, text: str) -> None:
    class Spaced(letters):  # type: ignore[misc, valid-type]
        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            return super().decode(token_ids, skip_special_tokens).replace("<eos>", " <eos>")  # type: ignore[no-any-return]

    answer = make(Spaced(), skip_special_tokens=False, spaces_between_special_tokens=spaces, ignore_eos=True)
    answer.take(news(1, EOS, EOS, 2, finish_reason=FinishReason.LENGTH), 0.0)
    assert answer.report(False).text == text


def test_deltas_join_to_the_whole(make: Any) -> None:
    answer = make(prompt_text="hi ", logprobs=0)
    pieces = []
    for token_id in (1, 2, 3):
        answer.take(news(token_id, logprobs=[Logprobs([token_id], [-1.0], 1)]), 0.0)
        pieces.append(answer.report(True))
    whole = answer.report(False)
    assert whole.text == "hi abc" == "".join(p.text for p in pieces)
    assert [p.token_ids for p in pieces] == [[1], [2], [3]]
    assert [p.text_offsets for p in pieces] == [[3], [4], [5]]
    assert whole.text_offsets == [3, 4, 5]
    assert [p.with_prompt for p in pieces] == [True, False, False]
    assert whole.with_prompt
    assert [len(p.logprobs) for p in pieces] == [1, 1, 1]
    assert whole.cumulative_logprob == -3.0


def test_an_echo_of_nothing_is_still_one(make: Any) -> None:
    """A prompt of special tokens alone has no text, and its logprobs belong to the first piece all the same."""
    answer = make(prompt_text="")
    answer.take(news(1), 0.0)
    assert answer.report(True).with_prompt
    answer.take(news(2), 0.0)
    assert not answer.report(True).with_prompt
    assert not make().report(True).with_prompt
