"""Answers that belong to a language, through the whole engine; bad grammars fail alone."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from pegboard import LLM, LLMEngine, SamplingParams, StructuredOutputs

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def constrained(max_tokens: int = 200, **language: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=1, max_tokens=max_tokens, structured_outputs=StructuredOutputs(**language))


@pytest.fixture(scope="module")
def llm(tiny: Any) -> Any:
    settings: dict[str, Any] = {"kv_cache": {"num_blocks": 400}, "executor": {"num_threads": 1}}
    with LLM(str(tiny), dtype="float32", **settings) as opened:
        yield opened


def test_a_random_model_speaks_every_kind_of_language(llm: LLM) -> None:
    """Its logits favour nothing sensible, so what comes out is the mask's doing."""
    kinds = {
        "json": constrained(json=PERSON),
        "regex": constrained(regex=r"\d{3}-[a-f]{2,5}"),
        "choice": constrained(choice=["yes", "no", "perhaps"]),
        "grammar": constrained(grammar='start: "(" ("a" | "b")+ ")"'),
    }
    outputs = dict(zip(kinds, llm.generate(["the"] * 4, list(kinds.values())), strict=True))
    assert {o.outputs[0].finish_reason for k, o in outputs.items() if k != "grammar"} == {"stop"}
    jsonschema.validate(json.loads(outputs["json"].text), PERSON)
    assert re.fullmatch(r"\d{3}-[a-f]{2,5}", outputs["regex"].text)
    assert outputs["choice"].text in ("yes", "no", "perhaps")
    assert re.fullmatch(r"\([ab]+\)?", outputs["grammar"].text)
    assert llm.stats().kv_usage == 0


def test_several_answers_each_have_their_own_state(llm: LLM) -> None:
    params = SamplingParams(
        n=6, temperature=2.0, seed=3, max_tokens=200, structured_outputs=StructuredOutputs(json=PERSON), prompt_logprobs=1
    )
    [output] = llm.generate("the", params)
    for answer in output.outputs:
        jsonschema.validate(json.loads(answer.text), PERSON)
    assert len({a.text for a in output.outputs}) > 1
    language = StructuredOutputs(json=PERSON)
    [single] = llm.generate("the", SamplingParams(temperature=2.0, seed=5, max_tokens=200, structured_outputs=language))
    assert single.text == output.outputs[2].text


def test_with_chunks_and_preemption(tiny: Any, open_llm: Any, random_prompts: Any) -> None:
    small = open_llm(
        tiny, kv_cache={"num_blocks": 40, "block_size": 4}, scheduler={"max_num_batched_tokens": 24, "max_num_seqs": 6}
    )
    outputs = small.generate(random_prompts([30, 20, 45, 10, 33, 7]), [constrained(90, json=PERSON)] * 6)
    assert small.stats().num_preemptions > 0
    for output in outputs:
        if output.outputs[0].finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), PERSON)
    assert sum(o.outputs[0].finish_reason == "stop" for o in outputs) >= 3


def test_an_answer_that_is_cut_off_says_so(llm: LLM) -> None:
    [output] = llm.generate("the", constrained(4, json=PERSON))
    assert output.outputs[0].finish_reason == "length"
    assert output.text.startswith("{")


BAD: list[tuple[str, dict[str, Any]]] = [
    ("regex", {"regex": "b**"}),
    ("regex", {"regex": "x{3,1}"}),
    ("regex", {"regex": "("}),
    ("type", {"json": {"type": "unknown"}}),
    ("ref", {"json": {"$ref": "#/definitions/none"}}),
    ("grammar", {"grammar": "complete nonsense ::= ((("}),
]


@pytest.mark.parametrize(("_kind", "language"), BAD)
def test_a_bad_grammar_fails_alone(llm: LLM, streams: Any, greedy: Any, _kind: str, language: dict[str, Any]) -> None:
    engine: LLMEngine = llm.engine
    alone = streams(engine)
    expected = [alone.add(f"healthy-{i}", [50, 60 + i], greedy(12)) for i in range(3)]
    alone.run()
    running = streams(engine)
    healthy = [running.add(f"healthy-{i}", [50, 60 + i], greedy(12)) for i in range(3)]
    running.step()
    with pytest.raises(ValueError, match=r"\w{8,}"):
        engine.add_request("bad", "the", constrained(**language))
    valid = running.add("valid", [50], constrained(json=PERSON))
    running.run()
    assert [s.tokens for s in healthy] == [s.tokens for s in expected]
    jsonschema.validate(json.loads(valid.text), PERSON)


@pytest.mark.parametrize("language", [
    {"json": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(5000)}}},
    {"json": {"$defs": {"a": {"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}, "additionalProperties": False}},
              "$ref": "#/$defs/a"}},
    {"json": {}},
])  # fmt: skip
def test_a_costly_schema_works_or_is_refused(llm: LLM, language: dict[str, Any]) -> None:
    """In bounded time, and whatever comes out is right as far as it goes."""
    try:
        [output] = llm.generate("the", constrained(40, **language))
    except ValueError as error:
        told = str(error)
        assert "schema" in told or "grammar" in told
        return
    answer = output.outputs[0]
    assert answer.finish_reason in ("stop", "length", "error")
    if answer.finish_reason == "stop":
        jsonschema.validate(json.loads(output.text), language["json"])


def test_an_abort_while_the_grammar_compiles(llm: LLM, greedy: Any) -> None:
    engine = llm.engine
    schema = {"type": "object", "properties": {f"q{i}": {"type": "string"} for i in range(300)}}
    engine.add_request("slow", "the", constrained(json=schema))
    engine.abort_request("slow")
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [o.outputs[0].finish_reason for o in outputs] == ["abort"]
    assert len(llm.generate("the", greedy(3))[0].outputs[0].token_ids) == 3


@pytest.mark.slow
def test_the_real_model_keeps_to_a_schema() -> None:
    questions = ["Describe Ada Lovelace.", "Describe a cat called Tom.", "Who are you?", "Give me a person."]
    conversations = [[{"role": "user", "content": q + " Answer in JSON."}] for q in questions]
    with LLM("smollm2", kv_cache={"num_blocks": 200}) as smollm:
        outputs = smollm.chat(conversations, constrained(json=PERSON))
    for output in outputs:
        assert output.outputs[0].finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), PERSON)
