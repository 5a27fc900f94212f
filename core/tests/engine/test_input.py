"""What a request may be, and what it is told when it may not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pegboard.contracts.model_source import ModelSource
from pegboard.engine.defaults import recommended_sampling
from pegboard.engine.eos import eos_token_ids
from pegboard.engine.info import EngineInfo
from pegboard.engine.input import Checks, InputProcessor
from pegboard.wire import GrammarSpec, SamplingParams, StructuredOutputs

ONE = SamplingParams(max_tokens=1)


def info(**changes: Any) -> EngineInfo:
    numbers = {"vocab_size": 62, "max_model_len": 128, "kv_tokens": 10_000, "num_blocks": 625, "block_size": 16}
    return EngineInfo(model="m", **{**numbers, **changes})


@pytest.fixture
def processor(letters: Any) -> InputProcessor:
    return InputProcessor(letters(), info(), eos_token_ids=[0, 7])


@pytest.mark.parametrize(
    ("prompt", "ids", "text"),
    [
        ("ab", [1, 2], "ab"),
        ([3, 4], [3, 4], None),
        ((3, 4), [3, 4], None),
        ({"prompt": "ab"}, [1, 2], "ab"),
        ({"prompt_token_ids": [5], "prompt": None}, [5], None),
    ],
)
def test_forms_of_a_prompt(processor: InputProcessor, prompt: Any, ids: list[int], text: str | None) -> None:
    processed = processor.process("r", prompt, ONE)
    assert (processed.request.prompt_token_ids, processed.prompt) == (ids, text)


def test_chat_messages_are_a_prompt(processor: InputProcessor, letters: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    expected = letters().encode("user: hi\nassistant: ")
    for prompt in (messages, {"messages": messages}):
        processed = processor.process("r", prompt, ONE)
        assert (processed.request.prompt_token_ids, processed.prompt) == (expected, None)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", r"prompt is empty \(zero tokens\)"),
        ([], r"prompt_token_ids is empty"),
        ({"prompt_token_ids": []}, r"prompt_token_ids is empty"),
        ({"prompt": ""}, r"prompt is empty"),
        ({}, r"exactly one of prompt, prompt_token_ids, messages; got none"),
        ({"prompt": "a", "messages": []}, r"exactly one of"),
        ({"promt": "a"}, r"unknown key 'promt'.*did you mean 'prompt'"),
        ({"prompt": [1]}, r"prompt must be text, got list; token ids go under 'prompt_token_ids'"),
        ({"prompt_token_ids": "ab"}, r"prompt_token_ids must be a list, got str"),
        ({"messages": []}, r"messages is empty"),
        ({"messages": "hi"}, r"messages must be a list"),
        ({"messages": [{"content": "hi"}]}, r"messages\[0\] must be a dict with a text 'role'"),
        ([{"role": "robot", "content": "hi"}], r"only user, assistant and system may speak"),
        (None, r"got NoneType"),
        (b"ab", r"got bytes"),
        (5, r"got int"),
    ],
)
def test_prompts_that_are_none(processor: InputProcessor, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        processor.process("r", prompt, ONE)


def test_an_empty_text_is_fine_for_a_tokenizer_that_begins_with_bos(letters: Any) -> None:
    processor = InputProcessor(letters(bos=True), info())
    assert processor.process("r", "", ONE).request.prompt_token_ids == [0]


@pytest.mark.parametrize("length", [126, 127, 128, 129])
@pytest.mark.parametrize("max_tokens", [1, 2, 5, None])
def test_edges_of_the_context(processor: InputProcessor, length: int, max_tokens: int | None) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    if length + (max_tokens or 1) <= 128:
        assert processor.process("r", [1] * length, params).request.max_tokens == (max_tokens or 128 - length)
        return
    with pytest.raises(ValueError, match="max_model_len=128") as caught:
        processor.process("r", [1] * length, params)
    assert str(length) in str(caught.value)
    if length < 128:
        assert f"max_tokens={max_tokens}" in str(caught.value)
        assert f"at most {128 - length}" in str(caught.value)


def test_a_small_kv_cache_is_the_limit_and_is_named(letters: Any) -> None:
    processor = InputProcessor(letters(), info(kv_tokens=20, num_blocks=5, block_size=4))
    assert processor.process("r", [1] * 20, ONE).request.max_tokens == 1
    assert processor.process("r", [1] * 5, SamplingParams(max_tokens=None)).request.max_tokens == 16
    with pytest.raises(ValueError, match=r"the KV cache holds 20 \(5 blocks of 4\), less than max_model_len=128"):
        processor.process("r", [1] * 21, ONE)


def test_min_tokens_beyond_the_context(processor: InputProcessor) -> None:
    with pytest.raises(ValueError, match=r"min_tokens=100 .* at most 28"):
        processor.process("r", [1] * 100, SamplingParams(max_tokens=None, min_tokens=100))


def test_ids_that_end_a_request(processor: InputProcessor) -> None:
    params = SamplingParams(stop_token_ids=(7, 9))
    assert processor.process("r", "a", params).request.stop_token_ids == [0, 7, 9]
    params = SamplingParams(stop_token_ids=(7, 9), ignore_eos=True)
    assert processor.process("r", "a", params).request.stop_token_ids == [7, 9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cache_salt": ""}, "cache_salt='' must be a non-empty string"),
        ({"cache_salt": 3}, "cache_salt=3"),
        ({"priority": 1.5}, "priority=1.5 must be an integer"),
        ({"priority": True}, "priority=True"),
        ({"priority": 2**63}, "priority=9223372036854775808 must be between"),
        ({"ext": {"acme": 1}}, "ext={'acme': 1}: no plugin in use takes fields"),
        ({"ext": [1]}, "ext="),
    ],
)
def test_other_fields(processor: InputProcessor, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        processor.process("r", "a", ONE, **arguments)


def test_a_prompt_dict_wins_over_arguments_and_these_over_params(processor: InputProcessor) -> None:
    params = SamplingParams(max_tokens=1, cache_salt="params", priority=3)
    prompt = {"prompt": "a", "cache_salt": "tenant", "priority": -1}

    def placed(prompt: Any, **arguments: Any) -> tuple[Any, int]:
        request = processor.process("r", prompt, params, **arguments).request
        return request.cache_salt, request.priority

    assert placed(prompt, priority=5, cache_salt="x") == ("tenant", -1)
    assert placed("a", priority=0, cache_salt="x") == ("x", 0)
    assert placed("a") == ("params", 3)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, 10),
        ({"truncate_prompt_tokens": 4}, 4),
        ({"truncate_prompt_tokens": 10}, 10),
        ({"truncate_prompt_tokens": 99}, 10),
        ({"truncate_prompt_tokens": -1, "max_tokens": None}, 10),
    ],
)
def test_truncation_keeps_the_end(processor: InputProcessor, fields: dict[str, Any], kept: int) -> None:
    ids = list(range(1, 11))
    processed = processor.process("r", ids, SamplingParams(**{"max_tokens": 1, **fields}))
    assert processed.request.prompt_token_ids == ids[-kept:]


@pytest.mark.parametrize(
    ("fields", "kept", "max_tokens"),
    [
        ({"max_tokens": 1}, 127, 1),
        ({"max_tokens": 28}, 100, 28),
        ({"max_tokens": 127}, 1, 127),
        ({"max_tokens": None}, 127, 1),
        ({"max_tokens": None, "min_tokens": 28}, 100, 28),
    ],
)
def test_truncation_to_what_the_context_takes(
    processor: InputProcessor, fields: dict[str, Any], kept: int, max_tokens: int
) -> None:
    params = SamplingParams(truncate_prompt_tokens=-1, **fields)
    processed = processor.process("r", "a" + "b" * 199, params)
    assert processed.request.prompt_token_ids == [2] * kept
    assert processed.request.max_tokens == max_tokens
    assert processed.prompt == "a" + "b" * 199


def test_truncation_makes_no_room_for_more_than_there_is(processor: InputProcessor) -> None:
    with pytest.raises(ValueError, match=r"max_tokens=128 .* lower max_tokens to at most 127"):
        processor.process("r", [1] * 200, SamplingParams(truncate_prompt_tokens=-1, max_tokens=128))
    with pytest.raises(ValueError, match=r"shorten the prompt to at most 127 tokens, or give truncate_prompt_tokens=-1"):
        processor.process("r", [1] * 200, SamplingParams(truncate_prompt_tokens=150))


def test_bad_words_become_ids(processor: InputProcessor) -> None:
    request = processor.process("r", "a", SamplingParams(bad_words=("ab", " ab", "c"))).request
    assert request.bad_word_ids == [[1, 2], [3]]
    assert processor.process("r", "a", ONE).request.bad_word_ids == []
    for bad in ("\x01", "a\x01", " \x01"):
        with pytest.raises(ValueError, match=r"bad_words\[1\]='.*x01' cannot be written with the model's tokens"):
            processor.process("r", "a", SamplingParams(bad_words=("a", bad)))


def test_a_request_in_the_core_always_has_a_seed(letters: Any) -> None:
    def seeds(engine_seed: int | None, count: int = 4) -> list[Any]:
        processor = InputProcessor(letters(), info(), seed=engine_seed)
        return [processor.process("same", "a", ONE).request.sampling.seed for _ in range(count)]

    assert len({*seeds(None), *seeds(None), *seeds(5), *seeds(6)}) == 16
    assert seeds(5) == seeds(5)
    assert all(0 <= seed < 2**64 for seed in [*seeds(None, 100), *seeds(5, 100)])
    processor = InputProcessor(letters(), info(), seed=5)
    for seed in (0, -1, 2**64 - 1):
        assert processor.process("r", "a", SamplingParams(seed=seed)).request.sampling.seed == seed


def test_logits_processors_look_at_the_parameters(letters: Any) -> None:
    def refuse(params: SamplingParams) -> None:
        if params.temperature > 1:
            raise ValueError(f"temperature={params.temperature} is too hot for me")

    processor = InputProcessor(letters(), info(), checks=Checks(params=[refuse]))
    processor.process("r", "a", ONE)
    with pytest.raises(ValueError, match="too hot"):
        processor.process("r", "a", SamplingParams(temperature=2.0))


def test_a_grammar_is_validated_and_sent_as_its_text(letters: Any) -> None:
    seen: list[GrammarSpec] = []

    def validate(spec: GrammarSpec) -> None:
        seen.append(spec)
        if spec.text == "(":
            raise ValueError("missing )")

    processor = InputProcessor(letters(), info(), checks=Checks(grammar=validate))
    request = processor.process("r", "a", SamplingParams(structured_outputs=StructuredOutputs(regex="a+"))).request
    assert request.grammar == GrammarSpec("regex", "a+") == seen[0]
    assert request.sampling.structured_outputs is None
    with pytest.raises(ValueError, match=r"structured_outputs.regex: missing \)"):
        processor.process("r", "a", SamplingParams(structured_outputs=StructuredOutputs(regex="(")))
    assert processor.process("r", "a", ONE).request.grammar is None


@pytest.mark.parametrize(
    ("language", "field"), [({"json": {}}, "json"), ({"json_object": True}, "json_object"), ({"choice": ["a"]}, "choice")]
)
def test_without_a_grammar_backend_it_is_said_how_to_get_one(
    processor: InputProcessor, language: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=rf"structured_outputs.{field} needs a grammar backend.*structured_outputs.backend"):
        processor.process("r", "a", SamplingParams(structured_outputs=StructuredOutputs(**language)))


@pytest.mark.parametrize("request_id", ["", None, 5])
def test_request_ids_are_text(processor: InputProcessor, request_id: Any) -> None:
    with pytest.raises(ValueError, match="request_id="):
        processor.process(request_id, "a", ONE)


def test_sampling_params_are_no_dict(processor: InputProcessor) -> None:
    with pytest.raises(ValueError, match="must be a SamplingParams, got dict"):
        processor.process("r", "a", {"max_tokens": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("generation", "config", "spec_ids", "own", "expected", "warned"),
    [
        (3, None, (), 0, (3, 0), []),
        ([3, 4, 5], 6, (6,), None, (3, 4, 5, 6), []),
        (None, [6], (), 0, (6, 0), []),
        (None, None, (), 0, (0,), []),
        ([3, 99], None, (), None, (3,), ["99"]),
        ([3, "x", True, -1], None, (3,), None, (3,), ["'x'", "True", "-1"]),
        (None, None, (), None, (), []),
    ],
)
def test_ids_of_the_model_that_end_an_answer(
    caplog: Any, generation: Any, config: Any, spec_ids: Any, own: Any, expected: Any, warned: list[str]
) -> None:
    source = ModelSource("m", "/m", "l", "t", {"eos_token_id": config}, {"eos_token_id": generation})
    spec, tokenizer = SimpleNamespace(vocab_size=10, eos_token_ids=spec_ids), SimpleNamespace(eos_token_id=own)
    assert eos_token_ids(spec, source, tokenizer) == expected  # type: ignore[arg-type]
    assert len(caplog.records) == len(warned)
    assert all(w in caplog.text for w in warned)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "eos_token_id": 1}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"max_new_tokens": 20, "top_k": 50}, {"max_tokens": 20, "top_k": 50}),
    ],
)
def test_recommended_sampling(generation: dict[str, Any], expected: dict[str, Any]) -> None:
    assert recommended_sampling(generation) == expected


def test_a_bad_recommendation_is_left_out_with_a_warning(caplog: Any) -> None:
    assert recommended_sampling({"temperature": -1, "top_p": 0.9}) == {"top_p": 0.9}
    assert "temperature=-1" in caplog.text
