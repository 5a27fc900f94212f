"""Grammar: constrains output to a language (JSON schema, regex, EBNF, choice)."""

from __future__ import annotations

import abc
from typing import Final, Literal

API: Final = 1

GrammarKind = Literal["json_schema", "json_object", "regex", "grammar", "choice"]


class GrammarState(abc.ABC):
    """Progress of one request through one grammar. Invariants: ``rollback`` undoes exactly what ``accept`` did."""

    @abc.abstractmethod
    def accept(self, token_ids: list[int]) -> bool:
        """Advance; False, and nothing changed, if the tokens don't fit."""

    @abc.abstractmethod
    def rollback(self, num_tokens: int) -> None: ...

    @abc.abstractmethod
    def fill_bitmask(self, bitmask: memoryview) -> None:
        """One bit per token id, set where it may come next: ``ceil(vocab/32)`` little-endian uint32."""

    @property
    @abc.abstractmethod
    def terminated(self) -> bool: ...


class GrammarBackend(abc.ABC):
    """Compiles grammars for one tokenizer. ``compile`` may be slow and runs off the step loop, from several threads."""

    @abc.abstractmethod
    def compile(self, kind: GrammarKind, text: str) -> GrammarState:
        """Raises ``ValueError`` for a grammar it cannot serve, in bounded time."""
