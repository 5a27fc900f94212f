"""ConfigError: everything that is wrong with a configuration, in one exception."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any

from pegboard.plugins.provider import Problem

__all__ = ["ConfigError", "Problem", "describe", "shown"]

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80
_repr.maxlist = _repr.maxtuple = _repr.maxdict = 8


class ConfigError(ValueError):
    """The configuration cannot be used. ``problems`` lists all that is wrong; the text names each one's path, value, source
    and remedy."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: list[Problem] = unique(problems)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        super().__init__(f"{head} in the configuration:\n" + "\n".join(f"  - {describe(p)}" for p in self.problems))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


def describe(problem: Problem) -> str:
    """One problem as text: where, what, what to do, who set it."""
    return str(problem) + (f" [set by {', '.join(problem.sources)}]" if problem.sources else "")


def shown(value: Any) -> str:
    """``repr`` of a value, shortened to what fits in a message."""
    return _repr.repr(value)


def unique(problems: Iterable[Problem]) -> list[Problem]:
    """Without repetitions, in the order of first appearance."""
    return list(dict.fromkeys(problems))
