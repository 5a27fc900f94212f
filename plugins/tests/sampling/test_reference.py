"""The sampler against plain Python that follows the definitions: token by token, with every option in every mixture."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pegboard.testing.reference_sampler import assert_distribution, reference_distribution
from pegboard.testing.sampling_batches import batch_of, random_logits
from pegboard.wire import SamplingParams
from pegboard_plugins.sampling import host_draw
from pegboard_plugins.sampling.sampler import DefaultSampler

from .random_batches import random_batch
from .reference import reference_tokens


def compare(logits: np.ndarray, batch: object) -> None:
    expected = reference_tokens(logits, batch)  # type: ignore[arg-type]
    output = DefaultSampler().sample(torch.from_numpy(logits.copy()), batch)  # type: ignore[arg-type]
    assert output.token_ids.tolist() == [-1 if token is None else token for token in expected]
    assert set(output.errors) == {row for row, token in enumerate(expected) if token is None}


@pytest.mark.parametrize("seed", range(40))
def test_random_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    compare(*random_batch(rng, rows=10, vocab=int(rng.choice([1, 33, 255, 256, 300, 700]))))


@pytest.mark.parametrize("seed", range(40, 50))
@pytest.mark.parametrize("few", [0, 60])
def test_random_batches_with_all_weights(seed: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that would sort a few candidates weigh all tokens instead: the same tokens are drawn."""
    monkeypatch.setattr(host_draw, "FEW", few)
    rng = np.random.default_rng(seed)
    compare(*random_batch(rng, rows=10, vocab=int(rng.choice([300, 700]))))


@pytest.mark.parametrize("seed", range(50, 65))
@pytest.mark.usefixtures("device_code")
def test_random_batches_in_device_code(seed: int) -> None:
    rng = np.random.default_rng(seed)
    compare(*random_batch(rng, rows=10, vocab=int(rng.choice([1, 255, 300, 700]))))


@pytest.mark.parametrize("seed", range(65, 69))
def test_random_batches_with_a_large_vocabulary(seed: int) -> None:
    """Bounds from group maxima."""
    compare(*random_batch(np.random.default_rng(seed), rows=6, vocab=9001))


@pytest.mark.parametrize("way", ["all weights", "candidates", "device"])
@pytest.mark.parametrize("shape", ["flat", "peaked", "steps", "equal", "masked"])
def test_nuclei_of_every_size(shape: str, way: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A small nucleus sends most winners back, until it races alone."""
    if way == "device":
        request.getfixturevalue("device_code")
    monkeypatch.setattr(host_draw, "FEW", 0 if way == "all weights" else 4096)
    size = 3000
    rng = np.random.default_rng(1)
    rows = {
        "flat": rng.normal(0, 0.1, size),
        "peaked": rng.normal(0, 4, size),
        "steps": rng.integers(0, 4, size) / 2,
        "equal": np.zeros(size),
        "masked": np.where(rng.random(size) < 0.01, rng.normal(0, 1, size), -np.inf),
    }
    options = [
        {"top_p": p, **more} for p in (1e-7, 0.3, 0.9, 0.999) for more in ({}, {"top_k": 2500}, {"top_k": 2500, "min_p": 0.05})
    ]
    params = [SamplingParams(seed=i, **each) for i, each in enumerate(3 * options)]  # type: ignore[arg-type]
    compare(np.tile(rows[shape].astype(np.float32), (len(params), 1)), batch_of(params, vocab_limit=size))


@pytest.mark.parametrize("way", ["all weights", "candidates", "device"])
@pytest.mark.parametrize("top_p", [0.05, 0.4, 0.8])
def test_draws_from_a_nucleus_follow_their_weights(
    top_p: float, way: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Those of the first race, of those run again, and of those of the nucleus alone."""
    if way == "device":
        request.getfixturevalue("device_code")
    monkeypatch.setattr(host_draw, "FEW", 0 if way == "all weights" else 4096)
    logits = random_logits(1, seed=22)[0]
    rows = 5000
    batch = batch_of([SamplingParams(temperature=1.5, top_k=250, top_p=top_p)] * rows, seeds=range(rows))
    drawn = DefaultSampler().sample(torch.from_numpy(np.repeat(logits[None], rows, axis=0)), batch).token_ids
    assert_distribution(drawn, reference_distribution(logits, batch, 0))


@pytest.mark.parametrize("params", [SamplingParams(top_p=0.8), SamplingParams(temperature=2.0, top_k=300, top_p=0.95)])
def test_every_token_of_the_support_is_reached(params: SamplingParams) -> None:
    logits = random_logits(1, seed=21, vocab=2000)[0]
    rows = 3000
    batch = batch_of([params] * rows, seeds=range(rows), vocab_limit=2000)
    drawn = DefaultSampler().sample(torch.from_numpy(np.repeat(logits[None], rows, axis=0)), batch).token_ids
    expected = reference_distribution(logits, batch, 0)
    assert (expected[drawn] > 0).all()
    assert set(np.flatnonzero(expected > 5e-3)) <= set(drawn.tolist())
