"""Incremental detokenizer: ids in, text out as soon as it is certain. The joined pieces are ``tokenizer.decode(ids)``."""

from __future__ import annotations

from pegboard.contracts.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
_MOST_PENDING = 3
"""An incomplete UTF-8 character is at most three bytes, and decodes to at most three replacement characters."""
_SHRINK_AT = 12
"""Window length from which on it is cut back, at once or at the next good place."""
_SHRINK_TO = (4, 5, 6, 7)
"""Lengths to cut it back to. Four in a row: one of them does not split a character of single-byte tokens."""
_FORCE_AT = 24
"""Window length at which replacement characters are given out that nothing can complete any more: only output that is no
text at all gets there."""
_FORCE_TO = (9, 18)
"""Lengths to cut it back to after that: three replacement characters are up to nine bytes, with empty tokens between twice as
many tokens."""


class IncrementalDetokenizer:
    """Decodes a growing list of token ids.

    Only a short window of the last ids is decoded for each token, so the cost per token does not depend on the length of
    the output. The window always holds some ids whose text has been given out already: they are the context that
    decides, for example, about a leading space. Replacement characters at the end of the window's text may yet become
    characters, and wait (all of them: some byte-fallback decoders show a whole run of bytes as such until its last
    character is complete); those followed by anything else never will, and are given out as ``decode`` gives them.

    Ids that ``skip_special_tokens`` leaves out never enter the window, nor do ids that add nothing to any text.

    ``spaces_between_special_tokens`` False: a special token that is shown and directly follows another one is shown as
    the vocabulary spells it, without the space that ``decode`` may put before it (WordPiece does; for byte-level and
    SentencePiece vocabularies nothing changes). In all else the joined pieces are ``decode``'s.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        nothing, special = frozenset[int](), tokenizer.special_ids
        self._left_out = special if skip_special_tokens else nothing
        self._close_up = nothing if skip_special_tokens or spaces_between_special_tokens else special
        self._after_special = False
        self._window: list[int] = []
        self._text = ""
        """The window's ids decoded."""
        self._given = 0
        """Characters of it that were given out."""

    @property
    def held(self) -> int:
        """Characters of the text so far that wait to become certain."""
        return len(self._text) - self._given

    def push(self, token_id: int) -> str:
        """Add one id; returns the text that has become certain, often "" and sometimes of several ids."""
        if token_id in self._left_out:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text == self._text and self._adds_nothing(token_id):
            self._window.pop()
            return ""
        certain = len(text.rstrip(REPLACEMENT))
        if len(self._window) >= _FORCE_AT:
            certain = max(certain, len(text) - _MOST_PENDING)
        new = text[self._given : certain]
        self._text, self._given = text, min(max(self._given, certain), len(text))
        if len(self._window) >= _SHRINK_AT:
            self._shrink()
        return self._closed_up(token_id, new) if self._close_up else new

    def flush(self) -> str:
        """The end: returns what is left, an unfinished character as ``decode`` shows it."""
        new = self._text[self._given :]
        self._window.clear()
        self._text, self._given = "", 0
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def _adds_nothing(self, token_id: int) -> bool:
        """Whether the window's last id, which left its text alone, does so with any text: it has no token, or an empty one.

        An empty token is kept where it is the first (what follows it is not), and where it ends an incomplete character.
        """
        if self._tokenizer.token_text(token_id) is None:
            return True
        if len(self._window) == 1 or self._tokenizer.token_bytes(token_id):
            return False
        return self._given == len(self._text) or not self._tokenizer.token_bytes(self._window[-2])

    def _closed_up(self, token_id: int, new: str) -> str:
        """``new`` without a space before the special token that it consists of, if it follows another one."""
        after_special, self._after_special = self._after_special, token_id in self._close_up
        if after_special and self._after_special:
            own = self._tokenizer.token_text(token_id) or ""
            return own if new.endswith(own) else new
        return new

    def _shrink(self) -> None:
        """Cut the window back to ids that, decoded alone, end with the same text: the last character given out and all that
        waits after it. That character fixes where the bytes after it begin, and that what follows is no start of a text. (A
        replacement character fixes nothing; then there must be more ids than an unfinished character has.)"""
        pending = len(self._text) - self._given
        if not self._given or pending > _MOST_PENDING:
            return
        forced = self._text[self._given - 1] == REPLACEMENT
        end = self._text[self._given - (not forced) :]
        for length in _FORCE_TO if forced else _SHRINK_TO:
            tail = self._window[-length:]
            text = self._decode(tail)
            if text and text.endswith(end):
                self._window, self._text, self._given = tail, text, len(text) - pending
                return
