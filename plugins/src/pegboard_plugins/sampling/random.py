"""Draws: one uniform number per row from a counter-based generator, and the token that it falls on.

The generator is SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014;
constants as in S. Vigna's public-domain ``splitmix64.c``) used as a function of (seed, output position) instead of as a
stream. There is no state that a discarded sample, a preemption or a neighbour could advance.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
BLOCK = 256
"""Tokens whose weights are summed together before the running sum; any value gives the same distribution."""


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[N] float64 in [0, 1): a function of each row's uint64 seed and output position.

    The seed is mixed before the position is added, so that neighbouring seeds do not give shifted copies of one stream.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        state = _mix(seeds.astype(np.uint64) + _GAMMA) + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def request_seed(engine_seed: int, request_id: str) -> int:
    """The 64-bit seed of a request that states none: a hash of the engine's seed and the request's id.

    All ranks find the same one without talking, and a request keeps it when it is preempted and comes back.
    """
    digest = hashlib.blake2b(request_id.encode(), digest_size=8, key=engine_seed.to_bytes(16, "little", signed=True))
    return int.from_bytes(digest.digest(), "little")


def draw_all(weights: torch.Tensor, uniform: np.ndarray) -> np.ndarray:
    """Inverse-CDF draw over whole rows: [R, V] non-negative weights, [R] uniforms, to [R] ids.

    Two levels keep the running sums short and exact: float64 over blocks of ids on the host, then inside the chosen block.
    """
    sums = block_sums(weights)
    target = uniform * np.cumsum(sums, axis=1)[:, -1]
    block = pick(sums, target)
    before = np.cumsum(np.pad(sums, ((0, 0), (1, 0))), axis=1)[np.arange(len(sums)), block]

    columns = block[:, None] * BLOCK + np.arange(BLOCK)
    exists = columns < weights.shape[1]
    columns = np.where(exists, columns, 0)
    inside = weights.gather(1, torch.from_numpy(columns).to(weights.device)).cpu().numpy()
    chosen = pick(np.where(exists, inside, 0.0).astype(np.float64), target - before)
    return columns[np.arange(len(columns)), chosen]


def block_sums(weights: torch.Tensor) -> np.ndarray:
    """[R, ceil(V / BLOCK)] float64 sums over blocks of ids, by the same additions whatever R is."""
    rows, size = weights.shape
    full = size - size % BLOCK
    sums = [weights[:, :full].reshape(rows, -1, BLOCK).sum(-1)]
    if full < size:
        sums.append(weights[:, full:].sum(-1, keepdim=True))
    return torch.cat(sums, dim=1).cpu().numpy().astype(np.float64)


def pick(weights: np.ndarray, target: np.ndarray) -> np.ndarray:
    """[R] index of the first entry whose running sum exceeds ``target``; never one of weight 0, whatever the rounding."""
    index = (np.cumsum(weights, axis=1) <= target[:, None]).sum(axis=1)
    last = weights.shape[1] - 1 - np.argmax(weights[:, ::-1] > 0, axis=1)
    return np.minimum(index, last)
