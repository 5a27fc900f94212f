"""What is wrong with a grammar is told in words that help, and what costs too much is refused in bounded time."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLParserLimits

from pegboard.testing.conformance.grammar import mask_of
from pegboard.wire import GrammarSpec
from pegboard_plugins.grammars.limits import MAX_EBNF, MAX_TEXT
from pegboard_plugins.grammars.llguidance_backend import LLGuidanceBackend
from pegboard_plugins.grammars.reasons import MAX_REASON, reason

Refusal = Callable[[GrammarSpec], str]


def schema(value: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(value))


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (GrammarSpec("regex", "b**"), "the regex 'b**' cannot be served: '*' at position 2 repeats a repetition"),
        (GrammarSpec("regex", "x{3,1}"), "the regex 'x{3,1}' cannot be served: invalid repetition count range"),
        (GrammarSpec("regex", "("), "unclosed group"),
        (GrammarSpec("regex", "(?=a)b"), "look-around"),
        (GrammarSpec("regex", r"(a)\1"), "backreferences are not supported"),
        (GrammarSpec("regex", r"\bfoo"), "lookarounds not supported"),
        (GrammarSpec("regex", r"[^\s\S]"), "no text can follow"),
        (GrammarSpec("regex", "(" * 5000 + ")" * 5000), "nested parentheses"),
        (GrammarSpec("regex", "[" * 100_000), "the regex cannot be served: unclosed character class"),
        (GrammarSpec("regex", "\ud800"), "half of a surrogate pair"),
        (GrammarSpec("regex", "a" * (MAX_TEXT + 1)), f"has {MAX_TEXT + 1} characters; the limit is {MAX_TEXT}"),
        (schema({"type": "unknown"}), "the JSON schema cannot be served: Invalid type: unknown"),
        (schema({"$ref": "#"}), "no text can follow"),
        (schema({"$ref": "#/$defs/none"}), "Pointer '/$defs/none' does not exist"),
        (schema({"$ref": "file:///etc/passwd"}), "does not fetch resources"),
        (schema(False), "the schema is false"),
        (schema([1]), "a schema is an object, but this is [1]"),
        (schema("x"), "a schema is an object"),
        (GrammarSpec("json_schema", ""), "the schema is no JSON"),
        (GrammarSpec("json_schema", '{"const": NaN}'), "Out of range float values"),
        (GrammarSpec("json_schema", "[" * 200_000), "nested too deeply"),
        (GrammarSpec("json_schema", '{"items":' * 200 + "{}" + "}" * 200), "recursion limit exceeded"),
        (schema({"not": {}}), 'Unimplemented keys: ["not"]'),
        (schema({"type": "string", "format": "sonnet"}), "Unknown format: sonnet"),
        (schema({"oneOf": [{"type": "string"}, {"maxLength": 3}]}), "use anyOf"),
        (schema({"type": "object", "patternProperties": {"a": {}, "b": {}}}), "not disjoint"),
        (schema({"type": "number", "minimum": 5, "maximum": 3}), "minimum (5) is greater than maximum (3)"),
        (GrammarSpec("choice", "{"), "the list of choices cannot be served: the choices are no JSON"),
        (GrammarSpec("choice", '["\\ud800"]'), "half of a surrogate pair"),
        (GrammarSpec("grammar", " \n"), "the grammar cannot be served: it is empty"),
        (GrammarSpec("grammar", "nonsense $$$"), "line 1, column 10: lexer error"),
        (GrammarSpec("grammar", "start: b\nb: missing"), 'line 2, column 4: unknown name: "missing"'),
        (GrammarSpec("grammar", "start: start"), "no text can follow"),
        (GrammarSpec("grammar", 'foo: "a"'), "no start rule found"),
        (GrammarSpec("grammar", "start: " + "(" * 10_000), "too deeply nested"),
        (GrammarSpec("grammar", 'start: "a"\n  <[5]>'), "line 2, <[5]>: special tokens are not part of a text"),
        (GrammarSpec("grammar", 'start: "a" <|im_end|>'), "line 1, <|im_end|>"),
        (GrammarSpec("grammar", 'start[stop="x"]: /.*/'), "line 1, stop=: this option of a rule has no effect here"),
        (GrammarSpec("grammar", "x" * (MAX_EBNF + 1)), f"the limit is {MAX_EBNF}"),
        (GrammarSpec("grammar", "root ::= missing"), "GBNF: Rule 'missing' not found"),
        (GrammarSpec("grammar", 'root ::= "\\'), "ends in the middle of an escape"),
        (GrammarSpec("grammar", "root ::= " + "(" * 10_000), "parentheses are nested too deeply"),
        (GrammarSpec("grammar", "\n".join(f'r{i} ::= "a"' for i in range(501))), "501 GBNF rules are more than the limit of 500"),
    ],
)
def test_the_reason_is_told(refusal: Refusal, spec: GrammarSpec, told: str) -> None:
    message = refusal(spec)
    assert told in message
    assert len(message) < MAX_REASON + 200, "however long the text was"


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        schema({"type": "string", "allOf": [{"pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(20)]}),
        schema({"type": "integer", "multipleOf": 1_000_003}),
        schema({"type": "object", "patternProperties": {f"^a{i}x": {} for i in range(1000)}}),
        GrammarSpec("grammar", "start: T\nT: " + " & ".join(f"/(a|b)*a(a|b){{{i}}}/" for i in range(1, 25))),
    ],
    ids=["intersection", "multiple", "patterns", "and"],
)
def test_what_would_compile_for_minutes_is_stopped(refusal: Refusal, spec: GrammarSpec) -> None:
    assert "takes longer than 3 s to compile; make it simpler" in refusal(spec)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("regex", "(((a{1000}){1000}){1000}){1000}"),
        GrammarSpec("regex", "(.*a.*){20}"),
        GrammarSpec("regex", r"\p{L}{1,100000}"),
        GrammarSpec("regex", "a" * MAX_TEXT),
        schema({"type": "string", "minLength": 10**9}),
        schema({"type": "array", "items": {"type": "array", "maxItems": 10**6}, "maxItems": 10**9}),
        schema({"type": "object", "properties": {f"p{i}": {"type": "object"} for i in range(300)}}),
        schema({"enum": [f"value {i}" for i in range(20_000)]}),
        schema({"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)} | {"d60": {}},
                "$ref": "#/$defs/d0"}),
        GrammarSpec("grammar", "start: t0\n" + "\n".join(f"t{i}: t{i + 1} t{i + 1}" for i in range(60)) + '\nt60: "a"'),
        GrammarSpec("grammar", 'start: a{1000000000}\na: "x"'),
        GrammarSpec("grammar", "start: " + " ".join(f'"w{i}"' for i in range(7000))),
        GrammarSpec("choice", json.dumps([f"choice number {i}" for i in range(20_000)])),
    ],
    ids=lambda spec: f"{spec.kind} {spec.text[:25]}",
)  # fmt: skip
def test_large_languages_are_served_step_by_step(backend: LLGuidanceBackend, spec: GrammarSpec) -> None:
    """Forced text costs no more than other text, and what is large is not unfolded."""
    backend.validate(spec)
    state = backend.compile(spec).start()
    for _ in range(30):
        allowed = mask_of(state)
        assert state.accept([max(allowed)])
        if state.terminated:
            break


@pytest.mark.slow
def test_five_thousand_properties(backend: LLGuidanceBackend) -> None:
    names = [f"p{i}" for i in range(5000)]
    state = backend.compile(schema({"type": "object", "properties": {n: {"type": "integer"} for n in names}})).start()
    text = b'{"p17": 3, "p4999": 12, "more": 1}'
    assert state.accept([1 + byte for byte in text])
    assert state.terminated
    every = schema({"type": "object", "properties": {n: {"enum": [1]} for n in names}, "required": names})
    state = backend.compile(every).start()
    assert state.accept([1 + byte for byte in json.dumps(dict.fromkeys(names, 1)).encode()])
    assert state.terminated


def test_a_grammar_that_becomes_too_costly_later(backend: LLGuidanceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes from the call that meets the limit, and from every one after it."""
    monkeypatch.setattr("pegboard_plugins.grammars.state.parser_limits", lambda: LLParserLimits(max_lexer_states=300))
    state = backend.compile(GrammarSpec("regex", "(a|b)*a(a|b){20}")).start()
    row = bytearray(40)

    def say(letters: str) -> None:
        for letter in letters:
            state.fill_bitmask(memoryview(row))
            assert state.accept([1 + ord(letter)])

    with pytest.raises(ValueError, match="the grammar cannot go on from here: lexer error: too many states"):
        say("".join(random.Random(0).choices("ab", k=1000)))
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot go on"):
            state.fill_bitmask(memoryview(row))
        with pytest.raises(ValueError, match="cannot go on"):
            state.accept([1 + ord("a")])
        assert not state.terminated


def test_reasons_of_the_library_are_put_in_words() -> None:
    assert reason("panic: index out of bounds\n<backtrace>\n 0: x") == "the grammar library failed on it: index out of bounds"
    assert reason("NoExtensionBias\n<state>\nTokens") == "no text can follow that the vocabulary can spell and the grammar allows"
    assert reason("NoExtension") == "no text can follow that the grammar allows"
    assert reason("at 3(7): odd\n  2 | a\n  3 | b\n     ^") == "line 3, column 7: odd"
    assert reason("x" * 1000) == "x" * 396 + " ..."
