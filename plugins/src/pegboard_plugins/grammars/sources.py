"""From a GrammarSpec to the library's own notation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Literal

from pegboard.wire import GrammarSpec
from pegboard_plugins.grammars.ebnf import to_lark
from pegboard_plugins.grammars.limits import check_text
from pegboard_plugins.grammars.regex import check_regex

Whitespace = Literal["fixed", "any"]

NO_FORCING: Final = '\n%llguidance {"no_forcing": true}\n'
"""Text that is forced is not forced as tokens: the mask allows every way to spell it. With forcing a grammar decides how much
forced text is computed in one step (a{1000000} takes a second and gigabytes), and ``accept`` takes more than the mask allows."""
_SEPARATORS: Final[Mapping[Whitespace, dict[str, Any]]] = {
    "fixed": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "any": {"whitespace_flexible": True},
}


def library_grammar(spec: GrammarSpec, whitespace: Whitespace = "fixed") -> str:
    """What the library compiles. Raises ``ValueError`` for what is wrong with the text itself."""
    check_text(spec)
    if spec.kind == "json_schema":
        return _schema_grammar(_schema(spec.text), whitespace)
    if spec.kind == "json_object":
        return _schema_grammar({"type": "object"}, whitespace)
    if spec.kind == "regex":
        from llguidance import regex_to_lark

        check_regex(spec.text)
        return _grammars({"lark_grammar": f"start: /{regex_to_lark(spec.text, '')}/{NO_FORCING}"})
    if spec.kind == "choice":
        quoted = " | ".join(json.dumps(text, ensure_ascii=False) for text in _choices(spec.text))
        return _grammars({"lark_grammar": f"start: CHOICE\nCHOICE: {quoted}{NO_FORCING}"})  # a terminal: cheap, however many
    if spec.kind == "grammar":
        return _grammars({"lark_grammar": to_lark(spec.text) + NO_FORCING})
    raise ValueError(f"grammar kind {spec.kind!r} is not known; known are json_schema, json_object, regex, grammar and choice")


def _grammars(*grammars: dict[str, Any]) -> str:
    try:
        text = json.dumps({"grammars": grammars}, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair, which is no character") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return text


def _schema_grammar(schema: Mapping[str, Any], whitespace: Whitespace) -> str:
    """``x-guidance`` is the library's own key for options; one in a user's schema is replaced."""
    named = {"name": "answer", "json_schema": {**schema, "x-guidance": _SEPARATORS[whitespace]}}
    return _grammars({"lark_grammar": f"start: @answer{NO_FORCING}"}, named)


def _schema(text: str) -> Mapping[str, Any]:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError("the schema is nested too deeply; use $defs and $ref") from None
    except ValueError as error:
        raise ValueError(f"the schema is no JSON: {error}") from None
    if schema is True:
        return {}
    if schema is False:
        raise ValueError("the schema is false, which no answer can match")
    if not isinstance(schema, dict):
        raise ValueError(f"a schema is an object, but this is {text:.40}")
    return schema


def _choices(text: str) -> list[str]:
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the choices are no JSON: {error}") from None
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise ValueError(f"choices are a JSON list of non-empty texts, but this is {text:.40}")
    return choices
