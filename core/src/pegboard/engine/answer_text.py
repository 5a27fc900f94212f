"""The text of one answer as it grows, and where in it each token begins."""

from __future__ import annotations

from pegboard.contracts.tokenizer import Tokenizer
from pegboard.engine.detokenizer import IncrementalDetokenizer


class LocatedText:
    """An incremental detokenizer that also tells the place at which each token's own text begins.

    That is where the text so far ends, what is held back included: characters that are not complete show as U+FFFD, and the token
    comes after them. Only a token that goes on with such a character begins where the character does. A token that shows
    nothing has the place of the next one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        start: int = 0,
    ) -> None:
        """``start``: length of the text before the first token."""
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, spaces_between_special_tokens)
        self._tokenizer = tokenizer
        self._left_out = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._shown = start
        self._last = start

    def locate(self, token_id: int) -> int:
        """Where ``token_id`` begins if it is pushed next, in characters."""
        held = self._detokenizer.held
        if held and not self._begins_a_character(token_id):
            self._last = max(self._last, self._shown)
        else:
            self._last = self._shown + held
        return self._last

    def push(self, token_id: int) -> str:
        """Add one id; returns the text that has become certain."""
        piece = self._detokenizer.push(token_id)
        self._shown += len(piece)
        return piece

    def flush(self) -> str:
        """The end: returns what was held back."""
        piece = self._detokenizer.flush()
        self._shown += len(piece)
        return piece

    def _begins_a_character(self, token_id: int) -> bool:
        if token_id in self._left_out:
            return False
        data = self._tokenizer.token_bytes(token_id)
        return data is None or (bool(data) and data[0] & 0b1100_0000 != 0b1000_0000)
