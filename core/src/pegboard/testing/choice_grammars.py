"""ChoiceGrammars: a grammar backend in plain Python that serves lists of choices, for tests and as an example of the contract."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pegboard.contracts.grammar import Grammar, GrammarBackend, GrammarState
from pegboard.engine.eos import eos_token_ids
from pegboard.wire import GrammarSpec

if TYPE_CHECKING:
    from pegboard.plugins import Composition


class Words:
    """The vocabulary: id to bytes for ids that stand for something, and the ids that end an answer."""

    def __init__(self, composition: Composition) -> None:
        spec, tokenizer = composition.spec, composition.create("tokenizer")
        self.num_words = -(-spec.vocab_size // 32)
        self.eos_ids = frozenset(eos_token_ids(spec, composition.source, tokenizer))
        ids = [token_id for token_id in range(min(spec.vocab_size, tokenizer.vocab_size)) if token_id not in self.eos_ids]
        self.tokens = {token_id: token for token_id in ids if (token := tokenizer.token_bytes(token_id))}


class ChoiceState(GrammarState):
    """Remembers what it accepted, and spells it anew for every question."""

    def __init__(self, choices: frozenset[bytes], words: Words) -> None:
        self._choices, self._words = choices, words
        self._accepted: list[int] = []

    def _text(self, token_ids: Sequence[int]) -> bytes | None:
        """What the tokens spell; None where they do not begin a choice."""
        body = token_ids[:-1] if token_ids and token_ids[-1] in self._words.eos_ids else token_ids
        if any(token_id not in self._words.tokens for token_id in body):
            return None
        text = b"".join(self._words.tokens[token_id] for token_id in body)
        fits = text in self._choices if len(body) < len(token_ids) else any(c.startswith(text) for c in self._choices)
        return text if fits else None

    def accept(self, token_ids: Sequence[int]) -> bool:
        if self._text([*self._accepted, *token_ids]) is None:
            return False
        self._accepted += token_ids
        return True

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens <= len(self._accepted)
        del self._accepted[len(self._accepted) - num_tokens :]

    def fill_bitmask(self, bitmask: memoryview) -> None:
        every = [*self._words.tokens, *self._words.eos_ids]
        allowed = self._words.eos_ids if self.terminated else [t for t in every if self._text([*self._accepted, t]) is not None]
        bitmask[:] = sum(1 << token_id for token_id in allowed).to_bytes(4 * self._words.num_words, "little")

    @property
    def terminated(self) -> bool:
        if self._accepted and self._accepted[-1] in self._words.eos_ids:
            return True
        text = self._text(self._accepted)
        return text is not None and [c for c in self._choices if c.startswith(text)] == [text]


class ChoiceGrammar(Grammar):
    def __init__(self, choices: frozenset[bytes], words: Words) -> None:
        self._choices, self._words = choices, words

    def start(self) -> GrammarState:
        return ChoiceState(self._choices, self._words)


class ChoiceGrammars(GrammarBackend):
    """Any other kind of grammar is refused."""

    def __init__(self, composition: Composition) -> None:
        self._composition = composition
        self._words: Words | None = None

    def validate(self, spec: GrammarSpec) -> None:
        if spec.kind != "choice":
            raise ValueError(f"a {spec.kind} cannot be served here; only lists of choices can")
        try:
            choices = json.loads(spec.text)
        except ValueError as error:
            raise ValueError(f"the choices are no JSON: {error}") from None
        if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
            raise ValueError(f"choices are a JSON list of non-empty texts, but this is {spec.text:.40}")

    def compile(self, spec: GrammarSpec) -> Grammar:
        self.validate(spec)
        if self._words is None:
            self._words = Words(self._composition)  # made twice, and equally, where two threads come first
        return ChoiceGrammar(frozenset(choice.encode() for choice in json.loads(spec.text)), self._words)
