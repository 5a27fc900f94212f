"""Numbers and races."""

from __future__ import annotations

import numpy as np
import pytest

from pegboard.testing.reference_sampler import assert_distribution
from pegboard_plugins.sampling.race import LANES, Times, lane_sums, race_listed, race_row
from pegboard_plugins.sampling.random import _GAMMA, _mix, request_seed, uniforms

from .reference import uniform


def test_splitmix_gives_the_published_numbers() -> None:
    """First outputs of splitmix64 from state 0 (as in Vigna's and in java.util.SplittableRandom's test vectors)."""
    with np.errstate(over="ignore"):
        states = np.arange(1, 4, dtype=np.uint64) * _GAMMA
    assert [hex(v) for v in _mix(states).tolist()] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def test_uniforms_equal_those_of_plain_integers() -> None:
    seeds, positions, keys = [0, 1, 2**64 - 1, 12345], [0, 7, 2**31 - 1, 3], [0, 1, 49151, 2**32 + 5]
    found = uniforms(np.array(seeds, np.uint64), np.array(positions), np.array(keys))
    assert found.tolist() == [[uniform(s, p, key) for key in keys] for s, p in zip(seeds, positions, strict=True)]


def test_uniforms_are_even_and_uncorrelated_over_seeds_positions_and_keys() -> None:
    seeds, positions = np.meshgrid(np.arange(60, dtype=np.uint64), np.arange(50), indexing="ij")
    u = uniforms(seeds.ravel(), positions.ravel(), np.arange(40)).reshape(60, 50, 40)
    assert u.min() > 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 0.005
    for axis in range(3):
        ahead, behind = np.take(u, range(1, u.shape[axis]), axis), np.take(u, range(u.shape[axis] - 1), axis)
        assert abs(np.corrcoef(ahead.ravel(), behind.ravel())[0, 1]) < 0.015


def test_request_seed_depends_on_engine_seed_and_request() -> None:
    assert request_seed(0, "a") == request_seed(0, "a")
    assert len({request_seed(s, r) for s in (0, 1, 2**70) for r in ("a", "b", "\ud800", "\ud801")}) == 12


@pytest.mark.parametrize("size", [1, 3, 255, 256, 257, 300, 1111])
def test_two_heats_follow_the_weights(size: int) -> None:
    """Of whole rows and of listed ids, which draw the same. A weight of zero is never drawn."""
    rng = np.random.default_rng(size)
    weights = (rng.random(size) ** 8 * (rng.random(size) < 0.6)).astype(np.float32)
    weights[0] += 0.1
    sums = lane_sums(weights)
    assert np.allclose(sums, [weights[lane::LANES].sum() for lane in range(LANES)])
    rows = 10_000
    times = Times.of(np.arange(rows), np.arange(rows) % 7, size, attempt=rows % 3)
    drawn = np.array([race_row(weights, sums, times.lanes[i], times.members[i]) for i in range(rows)])
    assert_distribution(drawn, weights.astype(np.float64) / weights.sum(dtype=np.float64))
    listed = np.tile(rng.permutation(size), (50, 1))
    first = Times(times.lanes[:50], times.members[:50])
    columns = race_listed(weights[listed].astype(np.float64), listed, first)
    assert listed[np.arange(50), columns].tolist() == drawn[:50].tolist()
