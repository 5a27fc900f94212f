"""The race of ``random`` in two heats: lanes of ids against each other, then the ids of the winning lane.

Lane ``l`` holds the ids that are ``l`` modulo ``LANES``. The weight of a lane is the sum of its ids' weights, so the two heats
together choose an id with the same probability as one race of all of them, and need a few hundred numbers instead of one per
id. Every random row is drawn this way, however few of its ids are left: a row whose logits differ in their last bits, and
therefore keeps one id more or less, meets the same numbers.
"""

from __future__ import annotations

import numpy as np

from pegboard_plugins.sampling.random import race

LANES = 256
"""A power of two. Any gives the same distribution; this one makes both heats about equally long for vocabularies of 2**16."""
_LANE_BITS = LANES - 1
_LANE_KEYS = 1 << 32
"""Lanes draw from other numbers than ids do: their keys begin where ids end."""


def lanes_of(ids: np.ndarray) -> np.ndarray:
    """``ids % LANES``, faster."""
    return ids & _LANE_BITS


def lane_sums(weights: np.ndarray) -> np.ndarray:
    """[LANES] float32: what each lane of one row weighs. ``weights`` [V] float32, contiguous."""
    full = len(weights) - len(weights) % LANES
    sums = np.add.reduce(weights[:full].reshape(-1, LANES), axis=0)
    sums[: len(weights) - full] += weights[full:]
    return sums


def draw_lanes(sums: np.ndarray, seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """First heat: [R] winning lanes of ``sums`` [R, LANES] float64."""
    return race(sums, seeds, positions, np.arange(LANES) + _LANE_KEYS)


def lane_ids(lanes: np.ndarray, size: int) -> np.ndarray:
    """[R, ceil(size / LANES)] ids of each row's lane. The last one may be ``size`` or more: there is no such id."""
    return lanes[:, None] + np.arange(0, size, LANES)


def draw_ids(weights: np.ndarray, seeds: np.ndarray, positions: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Second heat: [R] winning ids of ``ids`` [R, C], whose ``weights`` [R, C] float64 are 0 outside the winning lane."""
    return ids[np.arange(len(ids)), race(weights, seeds, positions, ids)]


def draw_few(weights: np.ndarray, seeds: np.ndarray, positions: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Both heats among listed ids: [R, C] float64 weights of ``ids`` [R, C] to [R] ids."""
    count, lanes = len(weights), lanes_of(ids)
    places = (np.arange(count)[:, None] * LANES + lanes).ravel()
    sums = np.bincount(places, weights.ravel(), count * LANES).reshape(count, LANES)
    winners = draw_lanes(sums, seeds, positions)
    return draw_ids(np.where(lanes == winners[:, None], weights, 0.0), seeds, positions, ids)
