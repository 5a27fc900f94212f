"""Weights of tokens on the host, and prefixes of their canonical order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np


def weigh(x: np.ndarray, top: np.ndarray, slope: np.ndarray, min_p: np.ndarray, out: np.ndarray) -> np.ndarray:
    """exp((x - top) * slope) in float32, 0 below ``min_p``: into ``out``, which has the shape of ``x``; the others fit to it.

    A weight has the same bits wherever it is computed. What lies far below the top may overflow to -inf on the way, whose
    weight is 0; callers silence numpy's warning.
    """
    np.subtract(x, top, out=out)
    np.multiply(out, slope, out=out)
    np.exp(out, out=out)
    if np.any(min_p > 0):
        np.multiply(out, out >= min_p, out=out)
    return out


@dataclass(frozen=True, slots=True)
class Cut:
    """The end of a prefix in canonical order: everything above ``value``, and what equals it up to id ``last``. Either of one
    row, or [R, 1] of many."""

    value: Any
    last: Any

    @classmethod
    def behind(cls, count: int, value: np.float32, x: np.ndarray) -> Cut:
        """The end of the first ``count`` of ``x`` [V], of which the last has ``value``."""
        equal = np.flatnonzero(x == value)
        return cls(float(value), int(equal[count - 1 - np.count_nonzero(x > value)]))

    def keeps(self, values: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Of the shape of ``values``, bool."""
        return (values > self.value) | ((values == self.value) & (ids <= self.last))

    def mask(self, x: np.ndarray) -> np.ndarray:
        """[V] bool: what it keeps of ``x`` [V]."""
        kept = x > self.value
        equal = np.flatnonzero(x == self.value)
        kept[equal[equal <= self.last]] = True
        return kept


EVERYTHING: Final = Cut(-math.inf, np.iinfo(np.int64).max)
