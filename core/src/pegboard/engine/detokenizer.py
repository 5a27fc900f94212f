"""Incremental detokenizer: ids in, text out as soon as it is certain. The joined pieces are ``tokenizer.decode(ids)``."""

from __future__ import annotations

from pegboard.contracts.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
_MOST_PENDING = 3
"""An incomplete UTF-8 character is at most three bytes, and decodes to at most three replacement characters."""
_SHRINK_AT = 12
"""Window length from which on it is cut back at the next good place."""
_SHRINK_TO = (4, 5, 6, 7)
"""Lengths to cut it back to. Four in a row: one of them does not split a character of single-byte tokens."""
_FORCE_AT = 64
"""Window length at which it is cut back anywhere: only output that is no text at all gets there."""


class IncrementalDetokenizer:
    """Decodes a growing list of token ids.

    Only a short window of the last ids is decoded for each token, so the cost per token does not depend on the length of
    the output. The window always holds some ids whose text has been given out already: they are the context that
    decides, for example, about a leading space. Replacement characters at the end of the window's text may yet become
    characters, and wait (all of them: byte-fallback decoders show a whole run of bytes as such until its last character is
    complete); those followed by anything else never will, and are given out as ``decode`` gives them.

    Ids that ``skip_special_tokens`` leaves out never enter the window.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._left_out = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._window: list[int] = []
        self._given = 0
        """Characters of the window's text that were given out."""

    def push(self, token_id: int) -> str:
        """Add one id; returns the text that has become certain, often "" and sometimes of several ids."""
        if token_id in self._left_out:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        certain = len(text.rstrip(REPLACEMENT))
        if len(self._window) >= _FORCE_AT:
            certain = max(certain, len(text) - _MOST_PENDING)
        new = text[self._given : certain]
        self._given = max(self._given, certain)
        if len(self._window) >= _SHRINK_AT:
            self._shrink(text)
        return new

    def flush(self) -> str:
        """The end: returns what is left, an unfinished character as ``decode`` shows it."""
        text = self._decode(self._window)
        new = text[self._given :]
        self._window.clear()
        self._given = 0
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def _shrink(self, text: str) -> None:
        """Cut the window back to ids that, decoded alone, give the same text as they give in it."""
        pending = len(text) - self._given
        forced = len(self._window) >= _FORCE_AT
        if pending and not forced:
            return
        for length in (_SHRINK_TO[-1],) if forced else _SHRINK_TO:
            tail = self._window[-length:]
            tail_text = self._decode(tail)
            if (forced and len(tail_text) >= pending) or (tail_text and text.endswith(tail_text)):
                self._window = tail
                self._given = max(0, len(tail_text) - pending)
                return
