from __future__ import annotations

import numpy as np
import pytest
import torch

from pegboard.contracts.sampler import Sampler
from pegboard.testing.conformance.sampler import (
    MIXED,
    SamplerConformance,
    batch_of,
    random_logits,
    reference_distribution,
)
from pegboard.wire import SamplingParams
from pegboard_plugins.sampling.penalties import apply_penalties
from pegboard_plugins.sampling.random import draw_all, request_seed, uniforms
from pegboard_plugins.sampling.sampler import DefaultSampler
from pegboard_plugins.sampling.top_k_top_p import _by_partition, _by_topk, nucleus


class TestDefaultSampler(SamplerConformance):
    def make(self) -> Sampler:
        return DefaultSampler()


def test_splitmix_gives_the_published_numbers() -> None:
    """First outputs of splitmix64 from state 0 (as in Vigna's and in java.util.SplittableRandom's test vectors)."""
    from pegboard_plugins.sampling.random import _GAMMA, _mix

    with np.errstate(over="ignore"):
        states = np.arange(1, 4, dtype=np.uint64) * _GAMMA
    assert [hex(v) for v in _mix(states).tolist()] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


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


@pytest.mark.parametrize("size", [3, 255, 256, 300, 1111])
def test_draw_all_follows_the_weights(size: int) -> None:
    """χ² over the heavy tokens and the rest together; a weight of zero is never drawn."""
    rng = np.random.default_rng(size)
    weights = (rng.random(size) ** 8 * (rng.random(size) < 0.6)).astype(np.float32)
    weights[0] += 0.1
    draws = 40_000
    drawn = np.concatenate(
        [
            draw_all(torch.from_numpy(np.tile(weights, (1000, 1))), np.arange(i, i + 1000), np.arange(1000))
            for i in range(0, draws, 1000)
        ]
    )
    assert (weights[drawn] > 0).all()
    share = weights.astype(np.float64) / weights.sum(dtype=np.float64)
    heavy = share * draws >= 10
    observed = np.append(np.bincount(drawn, minlength=size)[heavy], np.count_nonzero(~heavy[drawn]))
    expected = np.append(share[heavy], share[~heavy].sum()) * draws
    observed, expected = observed[expected > 0], expected[expected > 0]
    degrees = len(observed) - 1
    assert ((observed - expected) ** 2 / expected).sum() < degrees + 4 * np.sqrt(2 * degrees) + 4


@pytest.mark.parametrize("cut", ["nothing", "top_p", "top_k"])
def test_last_bits_of_the_logits_do_not_change_draws(cut: str) -> None:
    """Batch shapes and chunks change rounding; a seeded request must not notice."""
    rows = 2000
    logits = np.random.default_rng(33).normal(0, 2, 4000).astype(np.float32)
    ordered = np.sort(logits)[::-1]
    clear = 20 + int(np.argmax(ordered[19:60] - ordered[20:61]))  # a cut between close candidates is anybody's guess
    params = {"nothing": SamplingParams(), "top_p": SamplingParams(top_p=0.9), "top_k": SamplingParams(top_k=clear)}[cut]
    noise = np.random.default_rng(5).normal(0, 1e-5, (rows, 4000)).astype(np.float32)
    batch = batch_of([params] * rows, seeds=list(range(rows)), vocab_limit=4000)
    exact = DefaultSampler().sample(torch.from_numpy(np.tile(logits, (rows, 1))), batch).token_ids
    noisy = DefaultSampler().sample(torch.from_numpy(np.tile(logits, (rows, 1)) + noise), batch).token_ids
    assert np.count_nonzero(exact != noisy) <= 2


@pytest.mark.parametrize("find", [_by_partition, _by_topk])
@pytest.mark.parametrize("count", [1, 2, 17, 300])
def test_candidates_are_canonical(find: object, count: int) -> None:
    x = random_logits(12, seed=9)
    x[0, 50:] = -np.inf
    x[1] = 0.0
    x[2, 3], x[2, 4] = 0.0, -0.0
    argument = x if find is _by_partition else torch.from_numpy(x)
    values, ids = find(argument, count)  # type: ignore[operator]
    for row in range(len(x)):
        expected = np.argsort(-x[row], kind="stable")[:count]
        assert ids[row].tolist() == expected.tolist()
        assert np.array_equal(values[row], x[row, expected])


@pytest.mark.parametrize("params", MIXED[2:7])
def test_support_is_exactly_the_reference_one(params: SamplingParams) -> None:
    """An even grid of uniforms reaches every token with enough weight, and no other."""
    logits = random_logits(1, seed=21, vocab=2000)[0]
    expected = reference_distribution(logits, params)
    rows = 3000
    batch = batch_of([params] * rows, seeds=list(range(rows)), vocab_limit=2000)
    drawn = DefaultSampler().sample(torch.from_numpy(np.repeat(logits[None], rows, axis=0)), batch).token_ids
    assert (expected[drawn] > 0).all()
    assert set(np.flatnonzero(expected > 5e-3)) <= set(drawn.tolist())


def test_top_p_beyond_the_first_candidates_sorts_the_whole_row() -> None:
    logits = np.tile(np.linspace(0, 0.1, 3000, dtype=np.float32), (500, 1))
    params = SamplingParams(temperature=1.0, top_p=0.9)
    drawn = DefaultSampler().sample(torch.from_numpy(logits), batch_of([params] * 500, seeds=list(range(500)), vocab_limit=3000))
    expected = reference_distribution(logits[0], params)
    assert (expected[drawn.token_ids] > 0).all()
    assert len(set(drawn.token_ids.tolist())) > 300


def test_nucleus_keeps_at_least_one_and_reports_completeness() -> None:
    candidates = np.array([[0.5, 0.3, 0.1], [0.5, 0.3, 0.1]])
    weights, complete = nucleus(candidates, np.array([9, 9]), np.ones(2), np.array([1e-9, 0.95]))
    assert (weights[0] > 0).tolist() == [True, False, False]
    assert complete.tolist() == [True, False]


@pytest.mark.parametrize("presence", [-2.0, 0.0, 0.7])
@pytest.mark.parametrize("frequency", [-2.0, 0.0, 2.0])
@pytest.mark.parametrize("repetition", [0.5, 1.0, 1.8])
def test_penalties_equal_a_plain_loop(presence: float, frequency: float, repetition: float) -> None:
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition)
    prompts, outputs = [[5] * 10 + [6, 299, 2999], [8]], [[5, 6, 6, 9], []]
    batch = batch_of([params, params], prompts=prompts, outputs=outputs)
    logits = random_logits(2, seed=4)
    expected = logits.copy()
    for row in range(2):
        for token in set(prompts[row] + outputs[row]):
            if token < 300:
                value = expected[row, token]
                expected[row, token] = value / repetition if value > 0 else value * repetition
        for token in set(outputs[row]):
            expected[row, token] -= presence + frequency * outputs[row].count(token)
    got = torch.from_numpy(logits.copy())
    apply_penalties(got, np.arange(2), batch)
    assert np.allclose(got.numpy(), expected, atol=1e-5)


def test_bfloat16_rows_take_the_first_of_equal_maxima() -> None:
    logits = torch.zeros(2, 300, dtype=torch.bfloat16)
    logits[0, [200, 100]] = 3.0
    output = DefaultSampler().sample(logits, batch_of([SamplingParams(temperature=0.0)] * 2))
    assert output.token_ids.tolist() == [100, 0]


def test_a_row_without_allowed_tokens_is_an_error() -> None:
    logits = torch.full((1, 300), float("-inf"))
    output = DefaultSampler().sample(logits, batch_of([SamplingParams(seed=1)]))
    assert "no token is allowed" in output.errors[0]


def test_extreme_but_legal_parameters_give_a_token() -> None:
    params = [
        SamplingParams(temperature=1e6, seed=0),
        SamplingParams(temperature=2e-4, seed=0, top_p=1e-9),
        SamplingParams(temperature=1.0, min_p=1.0, seed=0),
        SamplingParams(temperature=1.0, top_k=10**6, top_p=0.999999, seed=2**64 - 1),
    ]
    output = DefaultSampler().sample(torch.from_numpy(random_logits(4)), batch_of(params))
    assert not output.errors
    assert ((output.token_ids >= 0) & (output.token_ids < 300)).all()
