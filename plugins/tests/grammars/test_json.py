"""Answers under a JSON schema validate by another implementation of JSON schema, whatever the model says."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from pegboard.testing.conformance.grammar import encode, mask_of, spelled, walk
from pegboard.wire import GrammarSpec
from pegboard_plugins.grammars.llguidance_backend import LLGuidanceBackend

TEXT = {"type": "string", "maxLength": 5}
SCHEMAS: dict[str, Any] = {
    "optional properties": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": TEXT, "c": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "more properties": {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "boolean"}},
    "map": {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "integer"}}, "additionalProperties": False},
    "sizes of maps": {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1, "maxProperties": 1},
    "list": {"type": "array", "items": {"enum": [1, "two", [3], {"four": None}]}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"const": 1}, TEXT], "items": False, "minItems": 2},
    "any of": {"anyOf": [{"type": "integer", "minimum": 10, "maximum": 99}, {"type": "string", "pattern": "^[a-c]{2}$"}]},
    "one of": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": kind}, "v": value}, "required": ["kind", "v"]}
            for kind, value in (("int", {"type": "integer"}), ("text", TEXT))
        ]
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"a": {"minimum": 3, "maximum": 5}, "b": TEXT}, "required": ["b"]},
        ]
    },
    "several types": {"type": ["integer", "null", "boolean"]},
    "range": {"type": "integer", "exclusiveMinimum": -3, "maximum": 1234},
    "float range": {"type": "number", "minimum": -0.5, "exclusiveMaximum": 2.25},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 3},
    "definitions": {"$defs": {"pair": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}},
                    "type": "object", "properties": {"x": {"$ref": "#/$defs/pair"}}, "required": ["x"]},
    "annotations": {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T", "description": "D", "default": 1,
                    "examples": [1], "type": "integer", "x-guidance": {"lenient": True, "item_separator": "zzz"}},
}  # fmt: skip


def schema(value: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(value))


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("whitespace", ["fixed", "any"])
def test_walks_validate(backend: LLGuidanceBackend, any_whitespace: LLGuidanceBackend, name: str, whitespace: str) -> None:
    served = backend if whitespace == "fixed" else any_whitespace
    grammar = served.compile(schema(SCHEMAS[name]))
    validator = jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    walks = [taken for seed in range(10) if (taken := walk(grammar.start(), seed)) is not None]
    assert len(walks) >= 5
    for taken in walks:
        value = json.loads(spelled(taken))
        validator.validate(value)


def test_white_space_is_that_of_json_dumps(backend: LLGuidanceBackend, any_whitespace: LLGuidanceBackend) -> None:
    spec = schema({"type": "object"})
    value = {"a": [1, 2, {"b": "c, d: e"}], "f": {}}
    for served, spaced in ((backend, False), (any_whitespace, True)):
        grammar = served.compile(spec)
        assert grammar.start().accept(encode(json.dumps(value))) is True
        for text in (json.dumps(value, separators=(",", ":")), json.dumps(value, indent=2), '{ "a"\n:  1 }'):
            assert grammar.start().accept(encode(text)) is spaced, text
        for text in (' {"a": 1}', '{"a": 1} ', '{"a": 1}\n'):
            assert grammar.start().accept(encode(text)) is False, "nothing around the answer"


def test_a_key_of_the_library_changes_nothing(backend: LLGuidanceBackend) -> None:
    spec = schema({"type": "array", "x-guidance": {"item_separator": ";", "whitespace_flexible": True}})
    assert backend.compile(spec).start().accept(encode("[1, 2]"))
    assert not backend.compile(spec).start().accept(encode("[1;2]"))
    with pytest.raises(ValueError, match="Unimplemented"):
        backend.validate(schema({"not": {}, "x-guidance": {"lenient": True}}))


def test_true_allows_everything(backend: LLGuidanceBackend) -> None:
    everything = mask_of(backend.compile(schema({})).start())
    assert mask_of(backend.compile(schema(True)).start()) == everything
    assert (
        everything
        > mask_of(backend.compile(GrammarSpec("json_object")).start())
        == {*encode("{"), *encode('{"')} | {token for token in everything if spelled([token]).startswith("{")}
    )
