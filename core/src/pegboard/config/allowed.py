"""What a field allows, in words: from the JSON schema of its type, and the message for a value that it does not allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from pegboard.config.errors import Problem, shown
from pegboard.config.fields import Leaf
from pegboard.config.names import did_you_mean, either
from pegboard.config.provenance import Origin


def allowed(schema: Mapping[str, Any]) -> str:
    """``an integer, at least 1``, ``one of auto, float32``, ``a list of text`` …"""
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    if schema.get("format") == "byte-size":
        return "a size in bytes, such as 1048576 or '4GiB'"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return either(list(dict.fromkeys(allowed(s) for s in schema[key])))
    match schema.get("type"):
        case "integer":
            return "an integer" + _range(schema)
        case "number":
            return "a number" + _range(schema)
        case "string":
            return "non-empty text" if schema.get("minLength") == 1 else "text"
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case "array":
            return f"a list of {allowed(items)}" if (items := schema.get("items")) else "a list"
        case "object":
            return "a table"
        case _:
            return "what its description says"


def _range(schema: Mapping[str, Any]) -> str:
    if "minimum" in schema and "maximum" in schema:
        return f" from {schema['minimum']} to {schema['maximum']}"
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    limits = [f"{word} {schema[key]}" for key, word in words.items() if key in schema]
    return f", {' and '.join(limits)}" if limits else ""


def invalid_value(leaf: Leaf, value: Any, origin: Origin, error: ValidationError | ValueError) -> Problem:
    """The problem of a value that ``leaf`` does not allow."""
    schema = leaf.schema()
    where = leaf.path
    reasons: list[str] = []
    if isinstance(error, ValidationError):
        details = error.errors(include_url=False, include_context=False)
        reasons = [d["msg"].partition(", ")[2] for d in details if d["type"] in ("value_error", "assertion_error")]
        if len(details) == 1 and details[0]["loc"]:
            where += "".join(f"[{key!r}]" for key in details[0]["loc"] if isinstance(key, int))
    else:
        reasons = [str(error)]
    what = shown(value)
    message = "; ".join(reasons) if reasons else "is not allowed"
    if what not in message:
        message = f"{what}: {message}" if reasons else f"{what} {message}"
    remedy = f"allowed: {allowed(schema)}"
    guess = did_you_mean(value, _choices(schema)) if isinstance(value, str) else ""
    return Problem(where, message, f"{remedy}; {guess}" if guess else remedy, (str(origin),))


def _choices(schema: Mapping[str, Any]) -> list[str]:
    own = [str(c) for c in schema.get("enum", [])]
    return own + [c for key in ("anyOf", "oneOf") for s in schema.get(key, []) for c in _choices(s)]
