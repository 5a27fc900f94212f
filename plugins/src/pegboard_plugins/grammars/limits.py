"""What a grammar may cost. A grammar comes from a stranger: every amount that it can drive up has an end."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from pegboard.wire import GrammarSpec

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_TEXT: Final = 512 * 1024
"""Characters of a schema, expression or list of choices."""
MAX_EBNF: Final = 64 * 1024
"""Characters of a grammar: GBNF is converted in Python, a few microseconds a character."""
MAX_GBNF_RULES: Final = 500
"""That conversion goes over all rules as often as there are rules, in the worst case."""
CHECK_SECONDS: Final = 3.0
"""Processor time in which a grammar must compile. Not wall time: a busy machine refuses nothing that an idle one takes."""
CHECK_MEMORY: Final = 1 << 30
"""Address space, in bytes, of the process in which it must compile."""
CHECK_IDLE: Final = 60
"""Seconds after which a process that checks nothing ends."""


@functools.cache
def parser_limits() -> LLParserLimits:
    """The library's limits. What is not stated is its default: 20 ms to build a lexer, 14 ms of lexer and 2.5 ms of parser work
    per token."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=25_000,  # 5,000 optional properties need 20,000; a step then costs some 50 ms
        max_lexer_states=50_000,  # 1 to 2 kB each
        verbose_errors=False,
    )


def check_text(spec: GrammarSpec) -> None:
    """Raises ``ValueError`` for a text that is too long to look at, or no text."""
    limit = MAX_EBNF if spec.kind == "grammar" else MAX_TEXT
    if len(spec.text) > limit:
        raise ValueError(f"the {spec.kind} has {len(spec.text)} characters; the limit is {limit}; make it shorter")
    try:
        spec.text.encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair, which is no character") from None
