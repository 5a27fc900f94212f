"""Draws from rows in the host's memory: one row at a time in numpy, so that what is read again is still in the core's cache.

A row of which few tokens can be kept (top-k, min-p) never gets a weight for each token: those few are found by comparing with a
bound that all of them reach, and only they are sorted. The others get all their weights. Both kinds of rows run the same
``race``, so which way a row takes does not change what is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pegboard_plugins.sampling.candidates import canonical, least_of_top
from pegboard_plugins.sampling.draws import Draws
from pegboard_plugins.sampling.race import ATTEMPTS, Times, race_listed, race_row
from pegboard_plugins.sampling.weights import Weights

FEW = 4096
"""Most candidates of a row that are sorted instead of weighing all tokens."""
_TOGETHER = 512
"""Rows with more candidates are not padded to one width with others."""
_LOWEST = float(np.finfo(np.float32).min)
"""A bound that masked logits, -inf, don't reach."""
_MIN_P_MARGIN = 1e-5
"""Relative error of a bound that is computed backwards from min-p; what it lets in too much is weighed and cut exactly."""


@dataclass(slots=True)
class _Few:
    """Row ``row`` of the draws, and ids [C], rising, with their logits: all that may be kept."""

    row: int
    ids: np.ndarray
    values: np.ndarray


@np.errstate(over="ignore")
def draw_on_host(x: np.ndarray, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """[R] ids and [R] float32 highest logits; an id means nothing where that is not finite. ``x`` [M, V] float32 is only read."""
    count, size = len(draws.at), x.shape[1]
    chosen, top = np.zeros(count, np.int64), np.empty(count, np.float32)
    times = Times.of(draws.seeds, draws.positions, size, attempt=0)
    few: list[_Few] = []
    scratch = np.empty(size, np.float32)
    for i, at in enumerate(draws.at.tolist()):
        row = x[at]
        top[i] = highest = float(row.max())
        if math.isfinite(highest):
            found = _candidates(row, draws, i, highest)
            if found is None:
                weights = Weights.of(row, highest, draws.temperature[i], int(draws.k[i]), float(draws.min_p[i]), scratch)
                chosen[i] = _draw_from_all(weights, draws, i, times)
            else:
                few.append(_Few(i, found, row[found]))
    for part in _padded_together(few):
        rows = np.array([each.row for each in part])
        chosen[rows] = _draw_from_few(part, draws.take(rows), top[rows], Times(times.lanes[rows], times.members[rows]), size)
    return chosen, top


def _draw_from_all(weights: Weights, draws: Draws, i: int, times: Times) -> int:
    """The id of row ``i``; ``times`` [R] are those of the first attempt."""
    top_p = float(draws.top_p[i])
    token = race_row(weights.values, weights.sums, times.lanes[i], times.members[i])
    attempt = 0
    while top_p < 1.0 and attempt < ATTEMPTS and not weights.in_nucleus(token, top_p):
        attempt += 1
        if attempt == ATTEMPTS:
            weights.keep_nucleus(top_p)
        again = Times.of(draws.seeds[i : i + 1], draws.positions[i : i + 1], len(weights.x), attempt)
        token = race_row(weights.values, weights.sums, again.lanes[0], again.members[0])
    return token


def _candidates(row: np.ndarray, draws: Draws, i: int, top: float) -> np.ndarray | None:
    """Ids [C], rising, among which is everything that top-k and min-p keep; None if these may be many."""
    k, min_p = int(draws.k[i]), float(draws.min_p[i])
    many = k > FEW or k == len(row)
    if many and min_p <= 0:
        return None
    bound = _LOWEST if many else max(_LOWEST, float(least_of_top(row, k)))
    if min_p > 0:
        least = top + float(draws.temperature[i]) * math.log(min_p)
        bound = max(bound, least - _MIN_P_MARGIN * max(1.0, abs(top), abs(least)))
    reach = row >= np.float32(bound)
    return np.flatnonzero(reach) if np.count_nonzero(reach) <= FEW else None


def _padded_together(few: list[_Few]) -> list[list[_Few]]:
    """Those with a usual number of candidates in one part, each of the others in its own."""
    usual = [each for each in few if len(each.ids) <= _TOGETHER]
    return [part for part in (usual, *([each] for each in few if len(each.ids) > _TOGETHER)) if part]


def _draw_from_few(few: list[_Few], draws: Draws, top: np.ndarray, times: Times, size: int) -> np.ndarray:
    """[R] ids, one for each of ``few``, to which the columns of the others belong; ``times`` are those of the first attempt."""
    width = max(len(each.ids) for each in few)
    values, ids = np.full((len(few), width), -np.inf, np.float32), np.zeros((len(few), width), np.int64)
    for i, each in enumerate(few):
        values[i, : len(each.ids)], ids[i, : len(each.ids)] = each.values, each.ids
    values, ids = canonical(values, ids)
    weights = values - top[:, None].astype(np.float64)
    weights /= draws.temperature[:, None]
    np.exp(weights, out=weights)
    weights[weights < draws.min_p[:, None]] = 0.0
    weights[np.arange(width) >= draws.k[:, None]] = 0.0
    nucleus = nucleus_mask(weights, draws.top_p)
    columns = race_listed(weights, ids, times)
    rejected = np.flatnonzero(~nucleus[np.arange(len(few)), columns])
    for attempt in range(1, ATTEMPTS + 1):
        if not rejected.size:
            break
        again = Times.of(draws.seeds[rejected], draws.positions[rejected], size, attempt)
        racing = weights[rejected] if attempt < ATTEMPTS else weights[rejected] * nucleus[rejected]
        columns[rejected] = race_listed(racing, ids[rejected], again)
        rejected = rejected[~nucleus[rejected, columns[rejected]]]
    return ids[np.arange(len(few)), columns]


def nucleus_mask(weights: np.ndarray, top_p: np.ndarray) -> np.ndarray:
    """[R, C] bool: the shortest prefix of each row of ``weights``, in canonical order, that reaches the share ``top_p`` [R]."""
    ends = np.cumsum(weights, axis=1)
    inside = (ends - weights < ends[:, -1:] * top_p[:, None]) | (top_p[:, None] >= 1.0)
    inside[:, 0] = True
    return inside
