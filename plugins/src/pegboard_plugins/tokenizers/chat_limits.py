"""How much work a chat template may do: loop rounds, seconds, and the size of what its operations would build.

Sizes are checked before the operation, since the memory would be gone after it.
"""

from __future__ import annotations

import re
import time
from contextvars import ContextVar
from typing import Any

import jinja2

MAX_CHARACTERS = 16 << 20
"""Longest string or list that a template may build, and longest prompt it may render."""
MAX_STEPS = 500_000
"""Loop rounds and macro calls per rendering."""
MAX_SECONDS = 30.0
MAX_WIDTH = 10_000
"""Widths, counts and digits that filters and formats may be given."""

_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_PERCENT_WIDTH = re.compile(r"%[-+ #0]*(?:\*|\d{5,})|%[-+ #0\d]*\.(?:\*|\d{5,})")
_BRACE_WIDTH = re.compile(r"\{[^{}]*:[^{}]*(?:\{|\d{5,})")


class TemplateLimitError(jinja2.TemplateError):
    """A template did more work, or would build something larger, than allowed."""


class Budget:
    """What one rendering has used up."""

    def __init__(self) -> None:
        self.steps = 0
        self.deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        self.steps += 1
        if self.steps & 255 == 0:  # the clock costs more than the round
            self.check()

    def check(self) -> None:
        if self.steps > MAX_STEPS:
            raise TemplateLimitError(f"the template loops more than {MAX_STEPS} times")
        if time.monotonic() > self.deadline:
            raise TemplateLimitError(f"the template runs longer than {MAX_SECONDS:g} seconds")


budget: ContextVar[Budget | None] = ContextVar("chat_template_budget", default=None)
"""Of the rendering under way in this thread or task."""


def check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise TemplateLimitError(f"the template builds something of {size} characters or items; the limit is {MAX_CHARACTERS}")


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Operands of ``+``, ``*``, ``**`` and ``%``."""
    if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        check_size(len(left) + len(right))
    elif operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
                check_size(len(sequence) * times)
        if isinstance(left, int) and isinstance(right, int):
            check_size(left.bit_length() + right.bit_length())
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        check_size(left.bit_length() * abs(right))
    elif operator == "%" and isinstance(left, str):
        check_percent_format(left)


def check_percent_format(text: str) -> None:
    if _PERCENT_WIDTH.search(text):
        raise TemplateLimitError(f"the template formats with a width above {MAX_WIDTH}, or one taken from an argument")


def check_brace_format(text: str) -> None:
    if _BRACE_WIDTH.search(text):
        raise TemplateLimitError(f"the template formats with a width above {MAX_WIDTH}, or one taken from an argument")


def check_method(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Calls of string methods whose result can be much larger than their arguments."""
    text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if not isinstance(text, str):
        return
    if name in _PADDING_METHODS:
        check_widths((*args, *kwargs.values()))
    elif name == "replace" and len(args) >= 2:
        check_replace(text, *args[:2])
    elif name == "join" and args and hasattr(args[0], "__len__"):
        check_size(len(text) * len(args[0]))


def check_widths(values: tuple[Any, ...]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise TemplateLimitError(f"the template asks for a width or count of {value}; the limit is {MAX_WIDTH}")


def check_replace(text: Any, old: Any, new: Any) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        check_size(len(text) + text.count(old) * len(new))
