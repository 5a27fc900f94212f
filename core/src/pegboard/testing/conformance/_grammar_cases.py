"""A vocabulary with everything that vocabularies have, and languages with what is in them and what is not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from pegboard.config import EngineConfig
from pegboard.contracts.model import ModelSpec
from pegboard.testing.fake_composition import FakeComposition
from pegboard.testing.list_tokenizer import ListTokenizer
from pegboard.wire import GrammarKind, GrammarSpec

_LONGER: Final = (
    '{"', '": ', '": "', '", "', '"}', "}}", "[]", ", ", "true", "fal", "se", "null", "name", "age", " the", "yes", "no",
    "12", "999", "-", "abc", "ab", "né", "🙂", "\n\n", "  ", '\\"', "\\u00",
)  # fmt: skip
TOKENS: Final[tuple[bytes | None, ...]] = (
    None,
    *(bytes([byte]) for byte in range(256)),
    *(text.encode() for text in _LONGER),
    "🙂".encode()[:2],
    "🙂".encode()[2:],
    b"a",  # a second token with the same bytes
    None,
    None,
)
EOS: Final = (0, len(TOKENS) - 1)
"""Both end an answer; the last but one is special too, but ends nothing."""
VOCAB_SIZE: Final = 320
"""That of the model: the ids from ``len(TOKENS)`` on have no token. A multiple of 32, which is where rows are mis-sized."""
MASK_BYTES: Final = 40


def composition() -> Any:
    """As much as a backend may ask of one. Its tokenizer is made anew at every ``create``."""
    spec = ModelSpec(
        architecture="Fake", vocab_size=VOCAB_SIZE, hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_size=8,
        max_model_len=1000, eos_token_ids=EOS,
    )  # fmt: skip
    return FakeComposition(EngineConfig(model="fake"), {"tokenizer": lambda: ListTokenizer(TOKENS, EOS[0])}, spec)


@dataclass(frozen=True, slots=True)
class Language:
    """``holds``: whether a text is in it. ``inside``, ``outside``: texts that are, and that are not even beginnings."""

    name: str
    spec: GrammarSpec
    holds: Callable[[str], bool]
    inside: tuple[str, ...]
    outside: tuple[str, ...] = ()
    endless: bool = field(default=False)
    """It has texts of any length, so that a walk may not end."""


def _schema(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


def _json(check: Callable[[Any], bool]) -> Callable[[str], bool]:
    def holds(text: str) -> bool:
        try:
            return check(json.loads(text))
        except ValueError:
            return False

    return holds


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def _person(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and list(value) == ["name", "age", "tags"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and isinstance(value["tags"], list)
        and len(value["tags"]) <= 2
        and all(tag in ("né", "🙂", 'q"') for tag in value["tags"])
    )


def _tree(value: Any) -> bool:
    return isinstance(value, dict) and not set(value) - {"v", "c"} and type(value["v"]) is int and all(map(_tree, value["c"]))


_PERSON: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["né", "🙂", 'q"']}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_TREE: Final = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer", "minimum": 0, "maximum": 9},
                "c": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["v", "c"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
_NUMBER: Final = r"[+-]?\d{1,3}(?:\.\d{1,2})?|nan"
_WORDS: Final = ["yes", "no", "né 🙂", "yes, please", 'say "a\\b"', "a\nb"]

LANGUAGES: Final = (
    Language(
        "schema",
        _schema(_PERSON),
        _json(_person),
        inside=('{"name": "Ada", "age": 36, "tags": ["né", "🙂"]}', '{"name": "\\n🙂", "age": 0, "tags": []}'),
        outside=(
            "[",
            '{"age"',
            '{"name": 1',
            '{"name": "Adalove',
            '{"name": "A", "age": 121',
            '{"name": "A", "age": 3, "tags": ["x"',
        ),
    ),
    Language(
        "recursive schema",
        _schema(_TREE),
        _json(_tree),
        inside=('{"v": 1, "c": []}', '{"v": 1, "c": [{"v": 2, "c": []}, {"v": 3, "c": [{"v": 4, "c": []}]}]}'),
        outside=('{"v": 1, "c": [1', '{"v": 1, "c": [{"v": 2}'),
        endless=True,
    ),
    Language(
        "any schema",
        _schema({}),
        _json(lambda _: True),
        inside=("1", '"x"', '{"a": [true, null]}'),
        outside=("x", "}"),
        endless=True,
    ),
    Language(
        "object",
        GrammarSpec("json_object"),
        _json(lambda value: isinstance(value, dict)),
        inside=("{}", '{"a": {"b": [1, "c"]}}'),
        outside=("[", "1"),
        endless=True,
    ),
    Language(
        "regex",
        GrammarSpec("regex", _NUMBER),
        _matches(_NUMBER),
        inside=("-12.5", "7", "nan", "999"),
        outside=("nano", "1234", "x", "1.234"),
    ),
    Language(
        "endless regex",
        GrammarSpec("regex", "(?:ab|🙂)*c"),
        _matches("(?:ab|🙂)*c"),
        inside=("c", "ab🙂c"),
        outside=("a🙂", "cc"),
        endless=True,
    ),
    Language(
        "choice",
        GrammarSpec("choice", json.dumps(_WORDS)),
        _WORDS.__contains__,
        inside=tuple(_WORDS),
        outside=("yess", "ne", "YES"),
    ),
)

_UNKNOWN: Final[GrammarKind] = "sonnet"  # type: ignore[assignment]
BAD: Final = {
    "no JSON": GrammarSpec("json_schema", "{"),
    "no schema": GrammarSpec("json_schema", "[1]"),
    "unknown type": _schema({"type": "unknown"}),
    "missing reference": _schema({"$ref": "#/$defs/none"}),
    "nothing but itself": _schema({"$ref": "#"}),
    "no value": _schema(False),
    "contradiction": _schema({"type": "integer", "minimum": 5, "maximum": 3}),
    "nested too deeply": GrammarSpec("json_schema", '{"items":' * 100_000 + "{}" + "}" * 100_000),
    "open parenthesis": GrammarSpec("regex", "("),
    "repeated repetition": GrammarSpec("regex", "b**"),
    "backward repetition": GrammarSpec("regex", "x{3,1}"),
    "empty regex": GrammarSpec("regex", ""),
    "no choices": GrammarSpec("choice", "[]"),
    "an empty choice": GrammarSpec("choice", '["a", ""]'),
    "nonsense": GrammarSpec("grammar", "complete nonsense ::= ((("),
    "empty grammar": GrammarSpec("grammar", ""),
    "unknown kind": GrammarSpec(_UNKNOWN, "x"),
}
"""What no backend can serve."""
