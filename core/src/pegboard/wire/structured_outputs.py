"""StructuredOutputs: the language that an answer must belong to."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

GrammarKind = Literal["json_schema", "json_object", "regex", "grammar", "choice"]


class GrammarSpec(msgspec.Struct, frozen=True):
    """A grammar as text, by kind: a JSON schema; nothing; a regular expression; a grammar (EBNF); a JSON list of texts."""

    kind: GrammarKind
    text: str = ""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Exactly one of: ``json`` (a JSON schema as a dict, as text, or a pydantic model class), ``json_object`` (any JSON object),
    ``regex`` (the whole answer matches), ``choice`` (one of these texts), ``grammar`` (EBNF; its dialect is the grammar
    backend's).

    Raises:
        ValueError: none or several are given, or one is not of its type. Whether a schema, expression or grammar can be served
            is found by the grammar backend when the request is made.
    """

    json: Any = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            raise ValueError(
                f"StructuredOutputs needs exactly one of {', '.join(self.__struct_fields__)}; got {' and '.join(given) or 'none'}"
            )
        if self.json is not None:
            msgspec.structs.force_setattr(self, "json", _schema_text(self.json))
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise ValueError(f"json_object={self.json_object!r:.80} must be true or false")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{name}={value!r:.80} must be a non-empty text")
        if self.choice is not None:
            msgspec.structs.force_setattr(self, "choice", _choices(self.choice))

    @property
    def spec(self) -> GrammarSpec:
        """As the grammar backend gets it."""
        if self.json is not None:
            return GrammarSpec("json_schema", self.json)
        if self.regex is not None:
            return GrammarSpec("regex", self.regex)
        if self.grammar is not None:
            return GrammarSpec("grammar", self.grammar)
        if self.choice is not None:
            return GrammarSpec("choice", jsonlib.dumps(list(self.choice)))
        return GrammarSpec("json_object")


def _schema_text(schema: Any) -> str:
    """A JSON schema in whatever form it was given, as text."""
    make = getattr(schema, "model_json_schema", None)
    if make is not None:
        try:
            schema = make()
        except Exception as error:  # of several kinds, for fields that JSON cannot hold
            raise ValueError(f"json={schema!r:.80} has no JSON schema: {str(error).partition(chr(10))[0]}") from error
    if isinstance(schema, str):
        try:
            schema = jsonlib.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"json is no JSON: {error}; give a JSON schema") from None
    if not isinstance(schema, (Mapping, bool)):
        raise ValueError(f"json must be a JSON schema, which is an object or a boolean; got {type(schema).__name__}")
    try:
        return jsonlib.dumps(schema if isinstance(schema, bool) else dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json is no JSON schema: {error}") from None


def _choices(choices: Any) -> tuple[str, ...]:
    if isinstance(choices, (str, bytes)) or not isinstance(choices, (list, tuple)) or not choices:
        raise ValueError(f"choice={choices!r:.80} must be a non-empty list of texts")
    for text in choices:
        if not isinstance(text, str) or not text:
            raise ValueError(f"choice entries must be non-empty texts, got {text!r:.80}")
    return tuple(choices)
