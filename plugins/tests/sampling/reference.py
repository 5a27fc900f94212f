"""The draw of the standard sampler in plain Python: SplitMix64 on integers, two heats, and what is sent back races again."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from pegboard.contracts.sampler import SamplingBatch
from pegboard.testing.reference_sampler import reference_distribution

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
LANES, ATTEMPTS = 256, 3


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int, key: int) -> float:
    state = (mix((seed + GAMMA) & MASK) + (position + 1) * GAMMA) & MASK
    return ((mix((mix(state) + (key + 1) * GAMMA) & MASK) >> 11) + 0.5) * 2.0**-53


def winner(weights: dict[int, float], seed: int, position: int) -> int:
    """Key whose time, -log(u) / weight, is the shortest."""
    return min(
        (key for key in weights if weights[key] > 0), key=lambda key: -math.log(uniform(seed, position, key)) / weights[key]
    )


def two_heats(weights: np.ndarray, seed: int, position: int, attempt: int) -> int:
    """The id that wins its lane, in the lane that wins."""
    base = attempt << 32
    lanes: dict[int, float] = {}
    for token in np.flatnonzero(weights).tolist():
        lanes[base + token % LANES] = lanes.get(base + token % LANES, 0.0) + float(weights[token])
    lane = winner(lanes, seed, position) - base
    members = {base + LANES + token // LANES: float(weights[token]) for token in range(lane, len(weights), LANES)}
    return lane + LANES * (winner(members, seed, position) - base - LANES)


def reference_tokens(logits: np.ndarray, batch: SamplingBatch) -> list[int | None]:
    """What each row must give; None where it must fail."""
    without_top_p = dataclasses.replace(batch, top_p=np.ones_like(batch.top_p))
    found: list[int | None] = []
    for row in range(len(logits)):
        racing, nucleus = (reference_distribution(logits[row], each, row) for each in (without_top_p, batch))
        found.append(None if nucleus is None else _draw(racing, nucleus, int(batch.seeds[row]), int(batch.positions[row])))
    return found


def _draw(racing: np.ndarray, nucleus: np.ndarray, seed: int, position: int) -> int:
    for attempt in range(ATTEMPTS):
        token = two_heats(racing, seed, position, attempt)
        if nucleus[token] > 0:
            return token
    return two_heats(nucleus, seed, position, ATTEMPTS)
