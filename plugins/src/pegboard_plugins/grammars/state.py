"""A compiled grammar, and the way of one request through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pegboard.contracts.grammar import Grammar, GrammarState
from pegboard_plugins.grammars.limits import parser_limits
from pegboard_plugins.grammars.reasons import reason

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


def start_matcher(grammar: str, vocabulary: LLTokenizer) -> LLMatcher:
    """Compile ``grammar`` and compute its first mask, which finds languages without a text. Raises ``ValueError``."""
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(reason(matcher.get_error()))
    return matcher


class LLGrammar(Grammar):
    """States share the lexer's states as far as they are known, behind a lock of the library."""

    def __init__(self, matcher: LLMatcher, vocabulary: LLTokenizer) -> None:
        """``matcher``: at the beginning."""
        self._matcher, self.vocab_size = matcher, vocabulary.vocab_size
        self.eos_ids = frozenset(vocabulary.eos_tokens)
        self.eos_mask = sum(1 << token_id for token_id in self.eos_ids).to_bytes(4 * -(-self.vocab_size // 32), "little")

    def start(self) -> GrammarState:
        return LLGrammarState(self, self._matcher.deep_copy())


class LLGrammarState(GrammarState):
    """Once a limit of the library is met, every further call but ``rollback`` raises ``ValueError``. Token ids outside the
    vocabulary don't fit."""

    def __init__(self, grammar: LLGrammar, matcher: LLMatcher) -> None:
        self._grammar, self._matcher = grammar, matcher
        self._num_ends = 0
        """End-of-sequence ids that were accepted, after all other tokens."""

    def accept(self, token_ids: Sequence[int]) -> bool:
        eos_ids, num_ends = self._grammar.eos_ids, 0
        while num_ends < len(token_ids) and token_ids[-1 - num_ends] in eos_ids:
            num_ends += 1
        body = list(token_ids[: len(token_ids) - num_ends])
        if not all(0 <= token_id < self._grammar.vocab_size for token_id in body) or (body and self._num_ends):
            return False
        taken = self._matcher.try_consume_tokens(body)
        self._check()
        if taken < len(body) or (num_ends and not self._matcher.is_accepting()):
            self._matcher.rollback(taken)
            return False
        self._num_ends += num_ends
        return True

    def rollback(self, num_tokens: int) -> None:
        num_ends = min(num_tokens, self._num_ends)
        self._num_ends -= num_ends
        if not self._matcher.rollback(num_tokens - num_ends):
            raise ValueError(f"cannot take back {num_tokens} tokens: {reason(self._matcher.get_error())}")

    def fill_bitmask(self, bitmask: memoryview) -> None:
        words = self._grammar.eos_mask if self._num_ends else self._matcher.compute_bitmask()
        self._check()
        bitmask[:] = words[: len(bitmask)]  # the library rounds up by a word more where the vocabulary is a multiple of 32

    @property
    def terminated(self) -> bool:
        return (self._num_ends > 0 or self._matcher.is_stopped()) and not self._matcher.is_error()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"the grammar cannot go on from here: {reason(self._matcher.get_error())}")
