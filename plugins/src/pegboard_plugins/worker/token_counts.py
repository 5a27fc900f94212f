"""ResidentCounts: which tokens a request knows, counted as they come instead of again in every step."""

from __future__ import annotations

import numpy as np

from pegboard.contracts.sampler import TokenCounts


class ResidentCounts:
    """Of one request while it holds its row. Each of its tokens is counted once; a token, once known, does not change."""

    def __init__(self, prompt_len: int) -> None:
        self.prompt_len, self._length, self._distinct = prompt_len, 0, 0
        self._ids, self._occurrences = np.empty(0, np.int64), np.empty(0, np.int32)
        self._place: dict[int, int] = {}

    def of(self, known: np.ndarray) -> TokenCounts:
        """Equal to a count from scratch of ``known`` [T], all tokens of the request so far; valid until the next call."""
        if self._length < self.prompt_len or len(known) < self._length:  # the first time, or tokens were taken back
            self._recount(known)
        else:
            for token in known[self._length :].tolist():
                self._append(token)
        return TokenCounts(self._ids[: self._distinct], self._occurrences[: self._distinct])

    def _recount(self, known: np.ndarray) -> None:
        self._ids = np.unique(known).astype(np.int64)
        self._length, self._distinct = len(known), len(self._ids)
        places = np.searchsorted(self._ids, known[self.prompt_len :])
        self._occurrences = np.bincount(places, minlength=self._distinct).astype(np.int32)
        self._place = {token: place for place, token in enumerate(self._ids.tolist())}

    def _append(self, token: int) -> None:
        """One more output token."""
        place = self._place.setdefault(token, self._distinct)
        if place == self._distinct:
            if place == len(self._ids):  # room for twice as many: growing costs O(1) per token
                self._ids, self._occurrences = (np.resize(column, 2 * place + 16) for column in (self._ids, self._occurrences))
            self._ids[place], self._occurrences[place] = token, 0
            self._distinct += 1
        self._occurrences[place] += 1
        self._length += 1
