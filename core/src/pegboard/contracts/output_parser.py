"""ToolParser and ReasoningParser: find structure in generated text."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Final

API: Final = 1


@dataclass(frozen=True, slots=True)
class ToolCall:
    """``arguments`` is a JSON text, as generated."""

    index: int
    id: str
    name: str
    arguments: str


class ToolParser(abc.ABC):
    """One per request. Invariant: the joined pieces of a stream equal the result for the whole text; malformed calls are
    content, never an exception."""

    @abc.abstractmethod
    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """New text in; new content and new (pieces of) calls out: a piece repeats ``index``, and names ``id``/``name`` once."""

    @abc.abstractmethod
    def finish(self) -> tuple[str, list[ToolCall]]:
        """What was held back."""


class ReasoningParser(abc.ABC):
    """One per request; splits reasoning from the answer. Same invariant as ``ToolParser``."""

    @abc.abstractmethod
    def feed(self, text: str) -> tuple[str, str]:
        """New text in; (reasoning, content) out."""

    @abc.abstractmethod
    def finish(self) -> tuple[str, str]: ...
