"""SamplingParams: what is refused when they are made, and how they travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from pydantic import BaseModel

from pegboard.wire import OutputKind, SamplingParams, StructuredOutputs

EVERYTHING = SamplingParams(
    n=3,
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.5,
    seed=2**64 - 1,
    logit_bias={5: -100, 7: 2.5},
    allowed_token_ids=(1, 5, 7),
    bad_words=("bad", "worse"),
    structured_outputs=StructuredOutputs(regex="a+"),
    max_tokens=None,
    min_tokens=3,
    stop=("\n", "END"),
    include_stop_str_in_output=True,
    stop_token_ids=(2,),
    ignore_eos=True,
    logprobs=0,
    prompt_logprobs=20,
    echo=True,
    skip_special_tokens=False,
    spaces_between_special_tokens=False,
    output_kind=OutputKind.DELTA,
    truncate_prompt_tokens=-1,
    cache_salt="tenant",
    priority=-3,
    ext={"acme": {"deadline": 1.5}},
)

BAD: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n=0 must be between 1 and 1024"),
    ({"n": 1.0}, "n=1.0 must be an integer"),
    ({"n": 2000}, "n=2000 must be between 1 and 1024"),
    ({"temperature": -0.1}, r"temperature=-0.1 must be in \[0"),
    ({"temperature": float("nan")}, "temperature=nan must be a finite number"),
    ({"temperature": "hot"}, "temperature='hot' must be a finite number"),
    ({"temperature": 10**400}, r"temperature=10{79} must be in \[0"),
    ({"temperature": "hot" * 99}, "temperature='[hot]{79} must be a finite number"),
    ({"top_p": 0.0}, r"top_p=0.0 must be in \(0, 1\]"),
    ({"top_p": 1.1}, r"top_p=1.1 must be in \(0, 1\]"),
    ({"top_k": -2}, "top_k=-2 must be at least -1"),
    ({"top_k": True}, "top_k=True must be an integer"),
    ({"top_k": 2**31}, "top_k=2147483648 must be at most 2147483647"),
    ({"min_p": 1.5}, "min_p=1.5"),
    ({"repetition_penalty": 0.0}, r"repetition_penalty=0.0 must be in \[0.001, 1000\]"),
    ({"repetition_penalty": 1e-50}, r"repetition_penalty=1e-50 must be in \[0.001, 1000\]"),
    ({"presence_penalty": 2.5}, r"presence_penalty=2.5 must be in \[-2, 2\]"),
    ({"frequency_penalty": -3}, r"frequency_penalty=-3 must be in \[-2, 2\]"),
    ({"seed": 2**64}, "seed=18446744073709551616 must be between"),
    ({"seed": -(2**63) - 1}, "seed=-9223372036854775809 must be between"),
    ({"seed": 1.5}, "seed=1.5 must be an integer"),
    ({"logit_bias": [1, 2]}, r"logit_bias=\[1, 2\] must be a dict"),
    ({"logit_bias": {"x": 1}}, "a token id in logit_bias='x' must be an integer"),
    ({"logit_bias": {True: 1}}, "a token id in logit_bias=True must be an integer"),
    ({"logit_bias": {-1: 1}}, "a token id in logit_bias=-1 must be between 0"),
    ({"logit_bias": {2**63: 1}}, "a token id in logit_bias=9223372036854775808 must be between 0"),
    ({"logit_bias": {3: 101}}, r"logit_bias\[3\]=101 must be in \[-100, 100\]"),
    ({"logit_bias": {3: float("inf")}}, r"logit_bias\[3\]=inf must be a finite number"),
    ({"logit_bias": {3: 10**400}}, r"logit_bias\[3\]=10{79} must be in \[-100"),
    ({"logit_bias": {3: 1.0, 4: np.float32(101)}}, r"logit_bias\[4\]=101.0 must be in \[-100"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"allowed_token_ids": 5}, "allowed_token_ids=5 must be a list"),
    ({"allowed_token_ids": [1, 1.5]}, "allowed_token_ids=1.5 must be an integer"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids=-1 must be between 0"),
    ({"bad_words": [""]}, "bad_words entries must be non-empty strings, got ''"),
    ({"bad_words": [5]}, "bad_words entries must be non-empty strings, got 5"),
    ({"bad_words": 5}, "bad_words=5 must be a list"),
    ({"bad_words": ["\ud800"]}, r"bad_words entries must be made of characters; '\\ud800' has half of a surrogate pair"),
    ({"structured_outputs": {"regex": "a"}}, "must be a StructuredOutputs"),
    ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
    ({"min_tokens": -1}, "min_tokens=-1 must be at least 0"),
    ({"min_tokens": 17}, "min_tokens=17 is larger than max_tokens=16"),
    ({"stop": 5}, "stop=5 must be a list"),
    ({"stop": [""]}, "stop entries must be non-empty strings"),
    ({"stop": ["ok", "a\udfff"]}, "stop entries must be made of characters"),
    ({"stop_token_ids": 5}, "stop_token_ids=5 must be a list"),
    ({"stop_token_ids": "12"}, "stop_token_ids='12' must be a list"),
    ({"stop_token_ids": [2**31]}, "stop_token_ids=2147483648 must be between 0"),
    ({"ignore_eos": 1}, "ignore_eos=1 must be true or false"),
    ({"logprobs": 21}, "logprobs=21 must be between 0 and 20"),
    ({"logprobs": True}, "logprobs=True must be an integer"),
    ({"prompt_logprobs": -1}, "prompt_logprobs=-1 must be between 0 and 20"),
    ({"detokenize": False, "stop": "x"}, "stop strings need text"),
    ({"detokenize": False, "echo": True}, "echo needs text"),
    ({"skip_special_tokens": None}, "skip_special_tokens=None must be true or false"),
    ({"output_kind": "stream"}, "output_kind='stream' must be one of 'cumulative', 'delta', 'final'"),
    ({"output_kind": 1}, "output_kind=1 must be an OutputKind"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 leaves no prompt"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens=-2 must be at least -1"),
    ({"truncate_prompt_tokens": 2**64}, "truncate_prompt_tokens=18446744073709551616 must be at most"),
    ({"cache_salt": ""}, "cache_salt='' must be a non-empty string"),
    ({"priority": "high"}, "priority='high' must be an integer"),
    ({"ext": 5}, "ext=5 must be a dict"),
]


@pytest.mark.parametrize(("fields", "told"), BAD, ids=[f"{next(iter(f))}-{i}" for i, (f, _) in enumerate(BAD)])
def test_what_is_out_of_range_is_a_value_error(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SamplingParams(**fields)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"temperature=-1.*top_p=2.*stop_token_ids=-5"):
        SamplingParams(temperature=-1, top_p=2, stop_token_ids=[-5])


def test_every_field_has_a_refused_value() -> None:
    """So that a new field is not left unchecked."""
    refused = {name for fields, _ in BAD for name in fields}
    checked_alike = {"include_stop_str_in_output", "spaces_between_special_tokens"}  # as ignore_eos and skip_special_tokens
    assert refused | checked_alike == set(SamplingParams.__struct_fields__)


def test_edges_are_accepted() -> None:
    SamplingParams(seed=0, temperature=0, top_p=1, top_k=-1)
    SamplingParams(seed=-(2**63), presence_penalty=-2, frequency_penalty=2, logit_bias={})
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop=None, bad_words=None, stop_token_ids=None) == SamplingParams()  # type: ignore[arg-type]
    assert SamplingParams(bad_words="x").bad_words == ("x",)
    assert SamplingParams(output_kind="delta").output_kind is OutputKind.DELTA  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    """Not only where they happen to be Python's own, as numpy's float64 is: what is sent must be."""
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_p=np.float64(0.25),
        max_tokens=np.int64(7),  # type: ignore[arg-type]
        seed=np.uint64(2**64 - 1),  # type: ignore[arg-type]
        stop_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
        allowed_token_ids=list(np.arange(5)),  # type: ignore[arg-type]
        logit_bias={np.int32(3): np.float16(1.5)},  # type: ignore[dict-item]
    )
    assert params == SamplingParams(
        temperature=0.5,
        top_p=0.25,
        max_tokens=7,
        seed=2**64 - 1,
        stop_token_ids=(3, 4),
        allowed_token_ids=(0, 1, 2, 3, 4),
        logit_bias={3: 1.5},
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    with pytest.raises(ValueError, match=r"top_k=2\.0 must be an integer"):
        SamplingParams(top_k=np.float32(2))  # type: ignore[arg-type]


def test_a_bias_that_is_changed_later_changes_nothing() -> None:
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[3] = 1e9
    assert params.logit_bias == {3: 1.0}


def test_nothing_is_lost_on_the_wire() -> None:
    sent = msgspec.msgpack.encode(EVERYTHING)
    assert msgspec.msgpack.decode(sent, type=SamplingParams) == EVERYTHING
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams())) == {}, "defaults are not sent"


class Unwritable(BaseModel):
    """Has no JSON schema."""

    call: Callable[[int], int]


class Answer:
    @staticmethod
    def model_json_schema() -> dict[str, Any]:
        return {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"json": '{"type":"object"}'}, "json_schema", '{"type": "object"}'),
        ({"json": {}}, "json_schema", "{}"),
        ({"json": Answer}, "json_schema", '{"type": "object"}'),
        ({"json": False}, "json_schema", "false"),
        ({"json_object": True}, "json_object", ""),
        ({"json_object": False, "regex": "a+"}, "regex", "a+"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["a", "b"]}, "choice", '["a", "b"]'),
        ({"grammar": "root ::= 'a'"}, "grammar", "root ::= 'a'"),
    ],
)
def test_a_language_has_one_form(fields: dict[str, Any], kind: str, text: str) -> None:
    spec = StructuredOutputs(**fields).spec
    assert (spec.kind, spec.text) == (kind, text)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "needs exactly one of json, json_object, regex, choice, grammar; got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
        ({"json": "{"}, "json is no JSON"),
        ({"json": "[1]"}, "json must be a JSON schema, which is an object or a boolean; got list"),
        ({"json": 5}, "got int"),
        ({"json": {"a": object()}}, "json is no JSON schema"),
        ({"json": {"const": float("nan")}}, "json is no JSON schema: Out of range float"),
        ({"json": Unwritable}, r"json=<class '.*Unwritable'> has no JSON schema: .*Callable"),
        ({"json": BaseModel}, r"json=<class '.*BaseModel'> has no JSON schema"),
        ({"json_object": 1}, "json_object=1 must be true or false"),
        ({"json_object": 0}, "json_object=0 must be true or false"),
        ({"json_object": False}, "got none"),
        ({"regex": ""}, "regex='' must be a non-empty text"),
        ({"grammar": 5}, "grammar=5 must be a non-empty text"),
        ({"choice": []}, "must be a non-empty list of texts"),
        ({"choice": "ab"}, "must be a non-empty list of texts"),
        ({"choice": ["a", ""]}, "choice entries must be non-empty texts, got ''"),
    ],
)
def test_a_language_of_the_wrong_form_is_a_value_error(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        StructuredOutputs(**fields)
