"""Numbers for draws: a counter-based generator, so that every number is a function of (seed, output position, key).

It is SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; constants as in
S. Vigna's public-domain ``splitmix64.c``) used as a function instead of as a stream. There is no state that a discarded
sample, a preemption or a neighbour could advance.
"""

from __future__ import annotations

import hashlib

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def uniforms(seeds: np.ndarray, positions: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """[R, C] float64 in (0, 1): a function of row i's uint64 seed and output position, and of ``keys[j]`` (int64 >= 0).

    Seed and position are mixed before the next part is added, so that neighbours do not give shifted copies of one stream.
    """
    one = np.uint64(1)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        state = _mix(seeds.astype(np.uint64) + _GAMMA) + (positions.astype(np.uint64) + one) * _GAMMA
        bits = _mix(_mix(state)[:, None] + (keys.astype(np.uint64) + one) * _GAMMA)
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def request_seed(engine_seed: int, request_id: str) -> int:
    """The 64-bit seed of a request that states none: a hash of the engine's seed and the request's id.

    All ranks find the same one without talking, and a request keeps it when it is preempted and comes back.
    """
    name = request_id.encode("utf-8", "surrogatepass")  # ids are any text
    digest = hashlib.blake2b(name, digest_size=8, key=engine_seed.to_bytes(16, "little", signed=True))
    return int.from_bytes(digest.digest(), "little")
