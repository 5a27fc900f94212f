"""Regular expressions: those of Rust's regex crate, without look-around, word boundaries and backreferences."""

from __future__ import annotations

import re
from typing import Final

_TOKEN: Final = re.compile(r"\\.|\[\^?\]?|\{\d*,?\d*\}|.", re.DOTALL)
"""One escape, beginning of a character class, counted repetition, or single character."""


def check_regex(text: str) -> None:
    """Raises ``ValueError`` for an empty expression, and for a repetition of a repetition (``b**``): Rust takes it for ``(b*)*``,
    other dialects for an error or a possessive one, and it is mostly a slip."""
    if not text:
        raise ValueError("the expression is empty; give one that the whole answer must match")
    depth = 0  # of character classes, which may be nested
    repeats = lazy = False
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token[0] == "[":
            depth += 1
        elif token == "]":
            depth = max(0, depth - 1)
        if depth or not (token in ("*", "+", "?") or (token[0] == "{" and len(token) > 2)):
            repeats = lazy = False
        elif not repeats:
            repeats = True
        elif token == "?" and not lazy:
            lazy = True  # a*? is the lazy a*
        else:
            raise ValueError(f"{token!r} at position {match.start()} repeats a repetition; put what it repeats in parentheses")
