"""EBNF: Lark syntax as llguidance reads it, or GBNF (rules with ``::=`` and a rule ``root``), which is converted to it."""

from __future__ import annotations

import re
from typing import Final

from pegboard_plugins.grammars.limits import MAX_GBNF_RULES

_GBNF_RULE: Final = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_LARK_TOKEN: Final = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])+/?|(?P<special><[^<>\n]*>)|(?P<option>\b(?:stop|temperature)\s*=)'
)
"""Strings, comments and expressions, so that what they hold is not taken for syntax. Ends are optional: linear time."""


def to_lark(text: str) -> str:
    """``text`` as Lark. Raises ``ValueError`` where it cannot be converted, or asks for more than a mask can do."""
    if not text.strip():
        raise ValueError("it is empty; give rules, one of them 'start: ...'")
    num_gbnf_rules = len(_GBNF_RULE.findall(text))
    if num_gbnf_rules > MAX_GBNF_RULES:
        raise ValueError(f"{num_gbnf_rules} GBNF rules are more than the limit of {MAX_GBNF_RULES}; write it in Lark syntax")
    if num_gbnf_rules:
        return _from_gbnf(text)
    for match in _LARK_TOKEN.finditer(text):
        if match["special"] or match["option"]:
            line = text.count("\n", 0, match.start()) + 1
            what = "special tokens are not part of a text" if match["special"] else "this option of a rule has no effect here"
            raise ValueError(f"line {line}, {match[0]:.40}: {what}; leave it out")
    return text


def _from_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise ValueError("GBNF: parentheses are nested too deeply; use rules instead") from None
    except IndexError:
        raise ValueError("GBNF: it ends in the middle of an escape") from None
    except Exception as error:  # the converter has no error type of its own for most of what can be wrong
        raise ValueError(f"GBNF: {error or type(error).__name__}") from None
