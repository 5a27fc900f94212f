"""One row with a weight for each of its tokens, and where top-k and top-p cut it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pegboard_plugins.sampling.lanes import LANES, lane_sums, lanes_of
from pegboard_plugins.sampling.weights import EVERYTHING, Cut, weigh

_SAMPLE = 2048
"""Logits of a row that are looked at to guess where its nucleus ends."""
_SPREADS = (2.0, 6.0)
"""Standard deviations that the guess is given either way; a miss costs time, not correctness."""
_INFINITY = np.float32(np.inf)


@dataclass(slots=True)
class FullRow:
    """``x`` [V] float32; the others are as in ``weigh`` and ``Draws``."""

    x: np.ndarray
    top: np.float32
    slope: np.float32
    min_p: np.float32
    k: int
    top_p: float

    def weigh(self, scratch: np.ndarray) -> tuple[np.ndarray, Cut]:
        """[LANES] what each lane's kept tokens weigh, and the cut that keeps them. ``scratch`` [V] float32 is overwritten."""
        cut = EVERYTHING
        weights = self._weights(self.x, scratch)
        if self.k < len(self.x):
            place = len(self.x) - self.k
            cut = Cut.behind(self.k, np.partition(self.x, place)[place], self.x)
            np.multiply(weights, cut.mask(self.x), out=weights)
        sums = lane_sums(weights)
        return self._nucleus(weights, sums, cut) if self.top_p < 1.0 else (sums, cut)

    def _weights(self, x: np.ndarray, out: np.ndarray) -> np.ndarray:
        return weigh(x, self.top, self.slope, self.min_p, out)

    def _nucleus(self, weights: np.ndarray, sums: np.ndarray, cut: Cut) -> tuple[np.ndarray, Cut]:
        """The shortest prefix of what ``weights`` still has that weighs ``top_p`` of it: its lanes and its cut.

        What lies from ``high`` on is inside without having been sorted, what lies below ``low`` outside; only what is between is
        sorted. Both are guesses, which are widened until the end of the nucleus is between them.
        """
        total = float(sums.sum(dtype=np.float64))
        wanted = total * self.top_p
        for low, high in self._brackets(total - wanted, cut):
            inside, between, mass = self._split(weights, low, high)
            heavy = float(inside.sum(dtype=np.float64))
            if heavy < wanted <= heavy + float(mass.sum()):
                break
        values = self.x[between]
        falling = np.sort(values)[::-1]
        ends = np.cumsum(self._weights(falling, np.empty_like(falling)).astype(np.float64))
        count = int(np.searchsorted(ends, wanted - heavy)) + 1
        count = min(count, len(falling))  # rounding may leave the sum a little short
        end = Cut.behind(count, falling[count - 1], values)
        cut = Cut(end.value, int(between[end.last]))
        np.multiply(mass, cut.keeps(values, between), out=mass)
        return inside + np.bincount(lanes_of(between), mass, LANES), cut

    def _split(self, weights: np.ndarray, low: np.float32, high: np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[LANES] what lies from ``high`` on weighs; ids [C], rising, of what has a weight in [low, high), and these weights."""
        above = self.x >= high
        inside = lane_sums(weights * above) if high < _INFINITY else np.zeros(LANES, np.float32)
        between = np.flatnonzero((self.x >= low) & ~above)
        mass = weights[between]
        if mass.size and mass.min() <= 0:
            between, mass = np.compress(mass > 0, between), np.compress(mass > 0, mass)
        return inside, between, mass.astype(np.float64)

    def _brackets(self, tail: float, cut: Cut) -> Iterator[tuple[np.float32, np.float32]]:
        """Pairs of values, ever wider, that the end of the nucleus lies between when ``tail`` is the mass that stays outside.

        The mass below a value is estimated from every n-th logit; the estimate's own deviation says how far off it may be.
        """
        sample = np.sort(self.x[:: max(1, len(self.x) // _SAMPLE)])
        weights = self._weights(sample, np.empty_like(sample)).astype(np.float64)
        weights *= sample >= cut.value
        scale = len(self.x) / len(sample)
        below = np.cumsum(weights) * scale
        deviation = np.sqrt(scale * weights * below)  # weights rise, so a sum of squares is at most last times sum
        for spread in _SPREADS:
            first = int(np.searchsorted(below + spread * deviation, tail))
            inside = below - spread * deviation > tail
            low = sample[first - 1] if first > 0 else -_INFINITY
            yield low, sample[int(np.argmax(inside))] if inside.any() else _INFINITY
        yield -_INFINITY, _INFINITY
