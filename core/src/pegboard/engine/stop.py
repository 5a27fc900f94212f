"""Stop strings: found in text that arrives piece by piece, held back exactly as long as they might still come true."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class _Automaton:
    """Aho and Corasick's automaton of all stop strings. A state stands for a beginning of one or more of them: of all beginnings
    that the text read so far ends with, the longest. State 0 is the empty one."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        """Per state: that of the longest shorter beginning which it ends with."""
        self.length = [0]
        """Per state: its characters."""
        self.complete: list[str | None] = [None]
        """Per state: the longest stop string that it ends with."""
        for text in texts:
            self._insert(text)
        self._link()

    def advance(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def without_whole(self, state: int) -> int:
        """The state's longest ending that can still become a stop string: a whole one that starts no other cannot."""
        while state and not self._next[state]:
            state = self._fallback[state]
        return state

    def _insert(self, text: str) -> None:
        state = 0
        for character in text:
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self.length.append(self.length[state] + 1)
                self.complete.append(None)
            state = following
        self.complete[state] = text

    def _link(self) -> None:
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, following in self._next[state].items():
                fallback = self._fallback[following] = self.advance(self._fallback[state], character)
                self.complete[following] = self.complete[following] or self.complete[fallback]
                waiting.append(following)


class StopMatcher:
    """Feeds on text, gives back what may be shown.

    The match is looked for character by character, so the pieces that the text comes in don't matter. It is the stop string
    that *ends* first; of several that end at the same place, the longest. With one stop string it begins at
    ``text.find(stop)``; with several, at the smallest ``find`` in the text up to that end: one that begins earlier but
    ends later is not waited for.

    A match that ends while ``armed`` is False does not count (``min_tokens``); one that began then and ends later does.
    Text that might be the beginning of a stop string is held back, and nothing else; ``release`` gives it up at the end.

    Cost: proportional to the text, whatever the number of stop strings, and per piece what is held back.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """``include``: the stop string itself belongs to the text."""
        self._automaton = _Automaton(stops) if stops else None
        self._include = include
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, armed: bool = True) -> str:
        """Add ``text``; returns what has become certain. After a match (see ``matched``) nothing more is taken."""
        automaton = self._automaton
        if automaton is None or self.matched is not None:
            return "" if self.matched is not None else text
        state, pending = self._state, self._held + text
        for read, character in enumerate(text, start=len(self._held) + 1):
            state = automaton.advance(state, character)
            found = automaton.complete[state]
            if found is not None and armed:
                self.matched, self._held = found, ""
                return pending[: read if self._include else read - len(found)]
        self._state = automaton.without_whole(state)
        certain = len(pending) - automaton.length[self._state]
        self._held = pending[certain:]
        return pending[:certain]

    def release(self) -> str:
        """Give up what is still held back: nothing more will come."""
        held, self._held = self._held, ""
        return held
