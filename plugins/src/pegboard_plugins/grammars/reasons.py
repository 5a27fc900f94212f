"""What the library says went wrong, as something that a user can read."""

from __future__ import annotations

import re
from typing import Final

MAX_REASON: Final = 400
"""Characters; the library repeats the text that it was given, however long."""
_KNOWN: Final = {
    "NoExtensionBias": "no text can follow that the vocabulary can spell and the grammar allows",
    "NoExtension": "no text can follow that the grammar allows",
    "oneOf constraints are not supported": (
        "oneOf is served where its alternatives plainly exclude each other, for example by a required property with another "
        "const in each; use anyOf"
    ),
}
"""Beginnings of messages that need other words."""
_PLACE: Final = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_IN_REGEX: Final = re.compile(
    r"invalid regex .*\(in regex\): (?:regex parse error:.*?^error: )?([^\n]*)", re.DOTALL | re.MULTILINE
)


def reason(error: str) -> str:
    """The gist of the library's message."""
    if error.startswith("panic:"):
        first = error.removeprefix("panic:").partition("\n")[0].strip()
        return _shorten(f"the grammar library failed on it: {first}")
    error = error.partition("\n<")[0].strip()  # parser state and grammar follow in tags
    for beginning, words in _KNOWN.items():
        if error.startswith(beginning):
            return words
    regex = _IN_REGEX.search(error)
    if regex is not None:
        return _shorten(regex[1])
    place = _PLACE.match(error)
    if place is None:
        return _shorten(error)
    message = error[place.end() :].partition("\n")[0]  # the lines around it follow
    return _shorten(f"line {place[1]}, column {place[2]}: {message}")


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 4]} ..."
