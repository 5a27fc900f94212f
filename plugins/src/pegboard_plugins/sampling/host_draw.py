"""Draws from rows in the host's memory: one row at a time in numpy, so that what is read again is still in the core's cache.

A row of which few tokens can be kept (top-k, min-p) never gets a weight for each token: those few are found by comparing with a
bound that all of them reach, and only they are sorted. The others get all their weights. Both kinds of rows end in the same
two heats (``lanes``), so which way a row takes does not change what is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pegboard_plugins.sampling.candidates import canonical, least_of_top
from pegboard_plugins.sampling.draws import Draws
from pegboard_plugins.sampling.full_row import FullRow
from pegboard_plugins.sampling.lanes import draw_few, draw_ids, draw_lanes, lane_ids
from pegboard_plugins.sampling.weights import Cut, weigh

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


@dataclass(slots=True)
class _Full:
    """Row ``row`` of the draws, what its lanes weigh, and what is kept."""

    row: int
    sums: np.ndarray
    cut: Cut


@np.errstate(over="ignore")
def draw_on_host(x: np.ndarray, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """[R] ids and [R] float32 highest logits; where these are not finite there is no id, -1. ``x`` [M, V] float32 is read."""
    chosen, top = np.full(len(draws.at), -1, np.int64), np.empty(len(draws.at), np.float32)
    few: list[_Few] = []
    full: list[_Full] = []
    scratch = np.empty(x.shape[1], np.float32)
    for i, at in enumerate(draws.at.tolist()):
        row = x[at]
        highest = top[i] = row.max()
        if not math.isfinite(highest):
            continue
        found = _candidates(row, draws, i, float(highest))
        if found is None:
            slope, min_p = np.float32(1.0 / draws.temperature[i]), np.float32(draws.min_p[i])
            weighed = FullRow(row, highest, slope, min_p, int(draws.k[i]), float(draws.top_p[i])).weigh(scratch)
            full.append(_Full(i, *weighed))
        else:
            few.append(_Few(i, found, row[found]))
    for part in _padded_together(few):
        chosen[[each.row for each in part]] = _draw_candidates(part, draws, top)
    if full:
        chosen[[each.row for each in full]] = _draw_full_rows(full, x, draws, top)
    return chosen, top


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
    found = np.flatnonzero(row >= np.float32(bound))
    return found if len(found) <= FEW else None


def _padded_together(few: list[_Few]) -> list[list[_Few]]:
    """Those with a usual number of candidates in one part, each of the others in its own."""
    usual = [each for each in few if len(each.ids) <= _TOGETHER]
    return [part for part in (usual, *([each] for each in few if len(each.ids) > _TOGETHER)) if part]


def _draw_candidates(few: list[_Few], draws: Draws, top: np.ndarray) -> np.ndarray:
    """One id per entry of ``few``; ``top`` [R] are the highest logits of all rows."""
    width = max(len(each.ids) for each in few)
    values, ids = np.full((len(few), width), -np.inf, np.float32), np.zeros((len(few), width), np.int64)
    for j, each in enumerate(few):
        values[j, : len(each.ids)], ids[j, : len(each.ids)] = each.values, each.ids
    which = np.array([each.row for each in few])
    values, ids = canonical(values, ids)
    weights = values - top[which, None].astype(np.float64)
    weights /= draws.temperature[which, None]
    np.exp(weights, out=weights)
    weights[weights < draws.min_p[which, None]] = 0.0
    weights = keep_first(weights, draws.k[which], draws.top_p[which])
    return draw_few(weights, draws.seeds[which], draws.positions[which], ids)


def keep_first(weights: np.ndarray, k: np.ndarray, top_p: np.ndarray) -> np.ndarray:
    """``weights`` [R, C] in canonical order, with zeros for what top-k and top-p cut off; the first one stays.

    The first ``k`` count. The nucleus is the shortest prefix that reaches the share ``top_p`` of what they weigh together.
    """
    weights = np.where(np.arange(weights.shape[1]) < k[:, None], weights, 0.0)
    ends = np.cumsum(weights, axis=1)
    kept = (ends - weights < ends[:, -1:] * top_p[:, None]) | (top_p[:, None] >= 1.0)
    kept[:, 0] = True
    return np.where(kept, weights, 0.0)


def _draw_full_rows(full: list[_Full], x: np.ndarray, draws: Draws, top: np.ndarray) -> np.ndarray:
    """One id per entry of ``full``."""
    which = np.array([each.row for each in full])
    seeds, positions = draws.seeds[which], draws.positions[which]
    ids = lane_ids(draw_lanes(np.array([each.sums for each in full], np.float64), seeds, positions), x.shape[1])
    exists = ids < x.shape[1]
    values = x[draws.at[which, None], np.where(exists, ids, 0)]
    slope, min_p = (1.0 / draws.temperature[which]).astype(np.float32), draws.min_p[which].astype(np.float32)
    weights = weigh(values, top[which, None], slope[:, None], min_p[:, None], np.empty_like(values))
    ends = np.array([each.cut.value for each in full], np.float32), np.array([each.cut.last for each in full])
    weights *= exists & Cut(*(end[:, None] for end in ends)).keeps(values, ids)
    return draw_ids(weights.astype(np.float64), seeds, positions, ids)
