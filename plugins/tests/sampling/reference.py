"""The draw of the standard sampler in plain Python: SplitMix64 on integers, and two races of everything that is left."""

from __future__ import annotations

import math

import numpy as np

from pegboard.contracts.sampler import SamplingBatch
from pegboard.testing.reference_sampler import reference_distribution

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
LANES = 256


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


def reference_draw(probabilities: np.ndarray, seed: int, position: int) -> int:
    """The id that wins its lane, in the lane that wins."""
    lanes: dict[int, float] = {}
    for token in np.flatnonzero(probabilities).tolist():
        lane = 2**32 + token % LANES
        lanes[lane] = lanes.get(lane, 0.0) + float(probabilities[token])
    first = winner(lanes, seed, position) - 2**32
    members = range(first, len(probabilities), LANES)
    return winner({token: float(probabilities[token]) for token in members}, seed, position)


def reference_tokens(logits: np.ndarray, batch: SamplingBatch) -> list[int | None]:
    """What each row must give; None where it must fail."""
    found: list[int | None] = []
    for row in range(len(logits)):
        probabilities = reference_distribution(logits[row], batch, row)
        seed, position = int(batch.seeds[row]), int(batch.positions[row])
        found.append(None if probabilities is None else reference_draw(probabilities, seed, position))
    return found
