"""Grammar: constrains output to a language (JSON schema, regex, EBNF, choice)."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Final

from pegboard.wire import GrammarOutput, GrammarSpec

API: Final = 1


class GrammarState(abc.ABC):
    """Progress of one request through one grammar. Used from one thread at a time.

    Invariants: ``rollback`` undoes exactly what ``accept`` did; a token that ``accept`` takes is one that the mask allows.
    """

    @abc.abstractmethod
    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance; False, and nothing changed, if the tokens don't fit. An end-of-sequence id fits where the mask allows it, and
        then ends the language. Raises ``ValueError`` as ``fill_bitmask``."""

    @abc.abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Take back the last ``num_tokens`` accepted tokens."""

    @abc.abstractmethod
    def fill_bitmask(self, bitmask: memoryview) -> None:
        """One bit per token id, set where it may come next: ``ceil(vocab/32)`` little-endian uint32, all of them written. At
        the end of the language only end-of-sequence ids are set. Raises ``ValueError`` where the grammar turns out too
        costly to go on with: the request ends with that message."""

    @property
    @abc.abstractmethod
    def terminated(self) -> bool:
        """Nothing but an end of sequence can follow."""


class Grammar(abc.ABC):
    """A compiled grammar, shared by all requests that have it."""

    @abc.abstractmethod
    def start(self) -> GrammarState:
        """A new state at the beginning. Cheap."""


class GrammarBackend(abc.ABC):
    """Compiles grammars for one tokenizer. Constructed with ``composition``, ``config`` and ``options``; cheap to construct: what
    needs the vocabulary is made at the first ``compile``."""

    @abc.abstractmethod
    def validate(self, spec: GrammarSpec) -> None:
        """Raise ``ValueError``, in bounded time, for a grammar that cannot be served; says what is wrong with it. Runs in the
        front end, where no vocabulary may be at hand."""

    @abc.abstractmethod
    def compile(self, spec: GrammarSpec) -> Grammar:
        """May be slow; runs off the step loop, from several threads. Raises ``ValueError`` as ``validate``."""


class GrammarStates(abc.ABC):
    """The states of all requests that have a grammar, as a scheduler uses them. Core's; a scheduler with the capability
    ``grammars`` gets it as ``grammars`` and is only given requests whose grammar is compiled. Not thread-safe."""

    @abc.abstractmethod
    def bitmasks(self, step_id: int, slots: Sequence[int], request_ids: Sequence[str]) -> GrammarOutput:
        """Masks for rows that sample in a step, one request per slot. Called while the forward runs."""

    @abc.abstractmethod
    def accept(self, request_id: str, token_ids: Sequence[int]) -> str | None:
        """Advance by sampled tokens, without an end-of-sequence id. Returns why the request cannot go on, or None."""

    @abc.abstractmethod
    def terminated(self, request_id: str) -> bool:
        """Nothing but an end of sequence can follow: the request has ended."""

    @abc.abstractmethod
    def forget(self, request_id: str) -> None:
        """The request has ended. Unknown ids are ignored."""
