"""How a token is drawn: by an exponential race in two heats, which is run again when its winner is outside the nucleus.

A contender with weight w finishes after t / w, where t = -log(u); the first one home wins, with probability w / sum(w) (the
Gumbel-max trick in other words: W. Kool et al., "Stochastic beams and where to find them", ICML 2019, section 2.3). In the
first heat lanes race: lane ``l`` holds the ids that are ``l`` modulo ``LANES`` and weighs as much as they do together. In the
second heat the ids of the winning lane race. Together they choose an id with the same probability as one race of all ids,
and need a few hundred numbers instead of one per id.

The times are functions of (seed, output position, id), so logits that differ in their last bits, as they do between batch
shapes, change a draw only in a dead heat. Inverting the cumulative distribution at one number would be cheaper and was
dropped: there a rounding difference shifts every later boundary.

Top-p comes after the race: what top-k and min-p left runs, and a winner outside the nucleus is sent back and the race run
again with other times, which leaves each token of the nucleus with its share. Whether one token is in the nucleus is cheap to
see; where the nucleus ends is not, and is only found for rows that have been sent back ``ATTEMPTS`` times. For them the nucleus
races alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pegboard_plugins.sampling.random import uniforms

LANES = 256
"""A power of two. Any gives the same distribution; this one makes both heats about equally long for vocabularies of 2**16."""
ATTEMPTS = 3
"""With a nucleus of 0.9, one row in a thousand fails so often."""
_LANE_BITS, _SHIFT = LANES - 1, LANES.bit_length() - 1
_KEYS_PER_ATTEMPT = 1 << 32


@dataclass(slots=True)
class Times:
    """-log(u) of R rows: ``lanes`` [R, LANES], and ``members`` [R, ceil(size / LANES)], of ids ``lane + LANES * j``."""

    lanes: np.ndarray
    members: np.ndarray

    @classmethod
    def of(cls, seeds: np.ndarray, positions: np.ndarray, size: int, attempt: int) -> Times:
        keys = np.arange(LANES + -(-size // LANES)) + attempt * _KEYS_PER_ATTEMPT
        times = -np.log(uniforms(seeds, positions, keys))
        return cls(times[:, :LANES], times[:, LANES:])


def lanes_of(ids: np.ndarray) -> np.ndarray:
    """``ids % LANES``, faster."""
    return ids & _LANE_BITS


def lane_sums(weights: np.ndarray) -> np.ndarray:
    """[LANES] float32: what each lane of one row weighs. ``weights`` [V] float32, contiguous."""
    full = len(weights) - len(weights) % LANES
    sums = np.add.reduce(weights[:full].reshape(-1, LANES), axis=0)
    sums[: len(weights) - full] += weights[full:]
    return sums


def race_row(weights: np.ndarray, sums: np.ndarray, lane_times: np.ndarray, member_times: np.ndarray) -> int:
    """The winning id of one row: ``weights`` [V] and their ``lane_sums``, a row of ``Times``.

    A weight of 0 never wins, while there is one that is not. Equal finishing times, which take two equal 53-bit numbers, go to
    the lower lane or id.
    """
    lane = int(np.argmax(sums / lane_times))
    members = weights[lane::LANES]
    return lane + LANES * int(np.argmax(members / member_times[: len(members)]))


def race_listed(weights: np.ndarray, ids: np.ndarray, times: Times) -> np.ndarray:
    """[R] winning columns among listed ids: ``weights`` [R, C] float64 of ``ids`` [R, C]."""
    count, lanes = len(weights), lanes_of(ids)
    places = (np.arange(count)[:, None] * LANES + lanes).ravel()
    sums = np.bincount(places, weights.ravel(), count * LANES).reshape(count, LANES)
    winners = np.argmax(sums / times.lanes, axis=1)
    inside = np.where(lanes == winners[:, None], weights, 0.0)
    return np.argmax(inside / np.take_along_axis(times.members, ids >> _SHIFT, axis=1), axis=1)
