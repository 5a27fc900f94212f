"""Weights of one row's tokens, and its nucleus."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pegboard_plugins.sampling.race import lane_sums


@dataclass(slots=True)
class Weights:
    """``values`` [V] float32 weights of the tokens with logits ``x`` [V]: exp((x - top) / temperature), 0 for what top-k or min-p
    cut off. ``sums`` [LANES] float32 are those of lanes."""

    x: np.ndarray
    values: np.ndarray
    sums: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray, top: float, temperature: float, k: int, min_p: float, scratch: np.ndarray) -> Weights:
        """``scratch`` [V] float32 becomes ``values``. What lies far below the top may overflow to -inf on the way, whose weight
        is 0; callers silence numpy's warning."""
        values = np.subtract(x, np.float32(top), out=scratch)
        np.multiply(values, np.float32(1.0 / temperature), out=values)
        np.exp(values, out=values)
        if min_p > 0:
            np.multiply(values, values >= np.float32(min_p), out=values)
        if k < len(x):
            np.multiply(values, first_mask(x, np.partition(x, len(x) - k)[len(x) - k], k), out=values)
        return cls(x, values, lane_sums(values))

    def in_nucleus(self, token: int, top_p: float) -> bool:
        """Whether what comes before ``token``, in falling order and equal ones by id, weighs less than ``top_p`` of all."""
        own = self.x[token]
        before = float(np.add.reduce(self.values * (self.x > own)))
        before += float(self.values[token]) * np.count_nonzero(self.x[:token] == own)
        return before < self._wanted(top_p)

    def keep_nucleus(self, top_p: float) -> None:
        """Set the weights of all others to 0."""
        values = np.compress(self.values > 0, self.values)
        x = np.compress(self.values > 0, self.x)
        order = np.argsort(-x)
        ends = np.cumsum(values[order].astype(np.float64))
        count = min(int(np.searchsorted(ends, self._wanted(top_p))) + 1, len(order))  # rounding may leave the sum a little short
        np.multiply(self.values, first_mask(self.x, x[order[count - 1]], count), out=self.values)
        self.sums = lane_sums(self.values)

    def _wanted(self, top_p: float) -> float:
        return top_p * float(self.sums.sum(dtype=np.float64))


def first_mask(x: np.ndarray, value: np.float32, count: int) -> np.ndarray:
    """[V] bool: the first ``count`` of ``x`` [V] in falling order, equal ones by id; the last of them has ``value``."""
    mask = x > value
    equal = np.flatnonzero(x == value)
    mask[equal[: count - np.count_nonzero(mask)]] = True
    return mask
