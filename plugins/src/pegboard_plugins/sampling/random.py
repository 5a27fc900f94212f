"""Draws: an exponential race between tokens, timed by a counter-based generator of (seed, output position, token id).

Each token with weight w finishes after -log(u) / w; the first one home is the draw, which makes its probability w / sum(w)
(the Gumbel-max trick in other words: W. Kool et al., "Stochastic beams and where to find them", ICML 2019, section 2.3).
The numbers belong to the ids, so logits that differ in their last bits, as they do between batch shapes, change a draw only
where two tokens finish in a dead heat. Inverting the cumulative distribution at one number would be cheaper and was dropped:
there a rounding difference shifts every later boundary.

The generator is SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014;
constants as in S. Vigna's public-domain ``splitmix64.c``) used as a function instead of as a stream. There is no state
that a discarded sample, a preemption or a neighbour could advance.
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
    """[R, C] float64 in (0, 1): a function of row i's uint64 seed and output position, and of ``keys[i, j]`` (int64 >= 0).

    ``keys`` is [R, C], or [C] for all rows alike. Seed and position are mixed before the next part is added, so that neighbours
    do not give shifted copies of one stream.
    """
    one = np.uint64(1)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        state = _mix(seeds.astype(np.uint64) + _GAMMA) + (positions.astype(np.uint64) + one) * _GAMMA
        bits = _mix(_mix(state)[:, None] + (keys.astype(np.uint64) + one) * _GAMMA)
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def race(weights: np.ndarray, seeds: np.ndarray, positions: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """[R] winning column of ``weights`` [R, C] (non-negative, one positive at least); ``keys`` as in ``uniforms``.

    A weight of 0 never wins. Equal finishing times, which take two equal 53-bit numbers, go to the first column.
    """
    return np.argmax(weights / -np.log(uniforms(seeds, positions, keys)), axis=1)


def request_seed(engine_seed: int, request_id: str) -> int:
    """The 64-bit seed of a request that states none: a hash of the engine's seed and the request's id.

    All ranks find the same one without talking, and a request keeps it when it is preempted and comes back.
    """
    name = request_id.encode("utf-8", "surrogatepass")  # ids are any text
    digest = hashlib.blake2b(name, digest_size=8, key=engine_seed.to_bytes(16, "little", signed=True))
    return int.from_bytes(digest.digest(), "little")
