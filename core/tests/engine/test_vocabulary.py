"""Token ids outside the vocabulary are refused, wherever a request names them."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.engine.info import EngineInfo
from pegboard.engine.input import InputProcessor
from pegboard.wire import SamplingParams

SIZE = 62
BAD = [-1, SIZE, SIZE + 1000, 2**31, 2**63, 1.5, "x", True, None, [1]]


def info(vocab_size: int = SIZE) -> EngineInfo:
    return EngineInfo(model="m", vocab_size=vocab_size, max_model_len=128, kv_tokens=10_000, num_blocks=625, block_size=16)


@pytest.fixture
def processor(letters: Any) -> InputProcessor:
    return InputProcessor(letters(), info(), eos_token_ids=[0])


@pytest.mark.parametrize("bad", BAD)
def test_in_a_prompt(processor: InputProcessor, bad: Any) -> None:
    with pytest.raises(ValueError, match=r"prompt_token_ids\[1\]=.*\[0, 62\)"):
        processor.process("r", [1, bad, 2], SamplingParams())


@pytest.mark.parametrize("bad", BAD[:-1])
@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
@pytest.mark.parametrize("min_tokens", [0, 1])
def test_in_sampling_parameters(processor: InputProcessor, field: str, bad: Any, min_tokens: int) -> None:
    value: Any = {1: 0.5, bad: 0.5} if field == "logit_bias" else [2, bad]
    if bad is True and field == "logit_bias":
        value = {True: 0.5}
    with pytest.raises(ValueError, match=field) as caught:
        processor.process("r", "a", SamplingParams(min_tokens=min_tokens, **{field: value}))
    assert str(bad) in str(caught.value)


def test_the_largest_id_is_fine(processor: InputProcessor) -> None:
    last = SIZE - 1
    params = SamplingParams(logit_bias={last: 1.0}, allowed_token_ids=[last], stop_token_ids=[last])
    assert processor.process("r", [last], params).request.stop_token_ids == [0, last]


def test_ids_that_only_pad_the_embedding(letters: Any) -> None:
    """A prompt may hold them, nothing may choose them."""
    processor = InputProcessor(letters(), info(vocab_size=100))
    assert processor.process("r", [1, 99], SamplingParams()).request.prompt_token_ids == [1, 99]
    for fields in ({"logit_bias": {62: 1.0}}, {"allowed_token_ids": [62]}, {"stop_token_ids": [62]}):
        with pytest.raises(ValueError, match=r"62 is not in the model's vocabulary; ids are in \[0, 62\)"):
            processor.process("r", "a", SamplingParams(**fields))  # type: ignore[arg-type]


def test_ids_that_the_embedding_lacks(letters: Any) -> None:
    processor = InputProcessor(letters(), info(vocab_size=10))
    with pytest.raises(ValueError, match=r"tokens of prompt\[1\]=26 is not in the model's vocabulary"):
        processor.process("r", "az", SamplingParams())
    with pytest.raises(ValueError, match=r"allowed_token_ids\[0\]=10 .*\[0, 10\)"):
        processor.process("r", "a", SamplingParams(allowed_token_ids=[10]))
    assert processor.process("r", "a", SamplingParams(bad_words=["z", "b"])).request.bad_word_ids == [[2]]


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_more_alternatives_than_ids(letters: Any, field: str) -> None:
    processor = InputProcessor(letters(), info(vocab_size=10))
    assert processor.process("r", "a", SamplingParams(**{field: 10}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"{field}=11 is more than the 10 ids"):
        processor.process("r", "a", SamplingParams(**{field: 11}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"allowed_token_ids": [0, 1]}, False),
        ({"allowed_token_ids": [0]}, False),
        ({"allowed_token_ids": [0], "min_tokens": 2}, True),
        ({"allowed_token_ids": [0, 1], "min_tokens": 2}, False),
        ({"allowed_token_ids": [0, 1], "min_tokens": 2, "bad_words": ["a"]}, True),
        ({"allowed_token_ids": [1, 2], "bad_words": ["a", "b"]}, True),
        ({"allowed_token_ids": [1, 2], "bad_words": ["ab"]}, False),
        ({"allowed_token_ids": [0], "min_tokens": 2, "ignore_eos": True}, False),
    ],
)
def test_where_nothing_is_left_to_choose(processor: InputProcessor, fields: dict[str, Any], refused: bool) -> None:
    if not refused:
        assert processor.process("r", "a", SamplingParams(**fields))
        return
    with pytest.raises(ValueError, match="allowed_token_ids leaves nothing to choose"):
        processor.process("r", "a", SamplingParams(**fields))
