"""Stop strings: found in text that arrives piece by piece, held back exactly as long as they might still come true."""

from __future__ import annotations

from collections.abc import Sequence


class _Pattern:
    """One stop string as a Knuth-Morris-Pratt automaton: ``state`` characters of it are matched by the text so far."""

    __slots__ = ("_borders", "state", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.state = 0
        self._borders = [0] * len(text)
        """Per prefix: the length of its longest proper prefix that is also its suffix."""
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._borders[length - 1]
            length += text[i] == text[length]
            self._borders[i] = length

    def advance(self, character: str) -> bool:
        """Read one character; True when the pattern ends with it."""
        state = self.state
        while state and self.text[state] != character:
            state = self._borders[state - 1]
        state += self.text[state] == character
        complete = state == len(self.text)
        self.state = self._borders[state - 1] if complete else state
        return complete


class StopMatcher:
    """Feeds on text, gives back what may be shown.

    The match is the stop string that *ends* first in the text, whatever the pieces it came in; of several that end at
    the same place, the longest. A match that ends while ``armed`` is False does not count (``min_tokens``). Text that
    might be the beginning of a stop string is held back, and nothing else; ``release`` gives it up at the end.

    Cost: proportional to the text, times the number of stop strings.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """``include``: the stop string itself belongs to the text."""
        self._patterns = [_Pattern(s) for s in stops]
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, armed: bool = True) -> str:
        """Add ``text``; returns what has become certain. After a match (see ``matched``) nothing more is taken."""
        if not self._patterns or self.matched is not None:
            return "" if self.matched is not None else text
        pending = self._held + text
        for i, character in enumerate(text):
            ended = [p.text for p in self._patterns if p.advance(character)]
            if ended and armed:
                self.matched = max(ended, key=len)
                end = len(self._held) + i + 1
                self._held = ""
                return pending[: end if self._include else end - len(self.matched)]
        keep = max(p.state for p in self._patterns)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def release(self) -> str:
        """Give up what is still held back: nothing more will come."""
        held, self._held = self._held, ""
        return held
