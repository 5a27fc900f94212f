"""BadWords: token sequences that must not be completed, arranged so that a step looks at few of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class BadWords(Sequence[Sequence[int]]):
    """The sequences of one request, each of one token or more.

    Sequences of one token are always forbidden; the others are filed under their last token but one, which is the only one
    that a step has to look up when the output does not end with it.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._words = words
        self._always = np.array(sorted({word[0] for word in words if len(word) == 1}), np.int64)
        self._after: dict[int, list[Sequence[int]]] = {}
        for word in words:
            if len(word) > 1:
                self._after.setdefault(word[-2], []).append(word)

    @classmethod
    def of(cls, words: Sequence[Sequence[int]]) -> BadWords:
        return words if isinstance(words, BadWords) else cls(words)

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: Any) -> Any:
        return self._words[index]

    def forbidden(self, output: np.ndarray) -> np.ndarray:
        """[K] int64 ids that would complete one of them behind ``output`` [T], the tokens that the request has produced."""
        ends = self._after.get(int(output[-1])) if len(output) else None
        if ends is None:
            return self._always
        completing = [word[-1] for word in ends if output[1 - len(word) :].tolist() == list(word[:-1])]
        return np.append(self._always, np.array(completing, np.int64))
