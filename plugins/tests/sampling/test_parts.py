"""Candidates, prefixes, bad words, cells and log probabilities, each against its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pegboard.testing.sampling_batches import batch_of, random_logits
from pegboard.wire import SamplingParams
from pegboard_plugins.sampling import logprobs
from pegboard_plugins.sampling.bad_words import BadWords
from pegboard_plugins.sampling.candidates import _on_device, _on_host, least_of_top
from pegboard_plugins.sampling.host_draw import nucleus_mask
from pegboard_plugins.sampling.logprobs import logprobs_of
from pegboard_plugins.sampling.penalties import apply_penalties
from pegboard_plugins.sampling.race import lane_sums
from pegboard_plugins.sampling.weights import Weights, first_mask
from pegboard_plugins.sampling.working_rows import WorkingRows


@pytest.mark.parametrize("find", [_on_host, _on_device])
@pytest.mark.parametrize("count", [1, 2, 17, 299, 300])
def test_candidates_are_canonical(find: object, count: int) -> None:
    x = random_logits(12, seed=9)
    x[0, 50:] = -np.inf
    x[1] = 0.0
    x[2, 3], x[2, 4] = 0.0, -0.0
    values, ids = find(x if find is _on_host else torch.from_numpy(x), count)  # type: ignore[operator]
    for row in range(len(x)):
        expected = np.argsort(-x[row], kind="stable")[:count]
        assert ids[row].tolist() == expected.tolist()
        assert np.array_equal(values[row], x[row, expected])


@pytest.mark.parametrize("size", [5, 2047, 2048, 5001])
@pytest.mark.parametrize("k", [1, 5, 40, 256, 257, 2000])
def test_the_bound_of_the_first_k_holds_them_and_few_more(size: int, k: int) -> None:
    k = min(k, size)
    for seed in range(5):
        row = np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)
        found = np.count_nonzero(row >= least_of_top(row, k))
        assert k <= found <= 2 * k + 20


def test_masks_of_the_first_so_many() -> None:
    x = random_logits(1, seed=3)[0]
    order = np.argsort(-x, kind="stable")
    for count in range(1, len(x) + 1):
        assert set(np.flatnonzero(first_mask(x, x[order[count - 1]], count))) == set(order[:count])


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.99999])
@pytest.mark.parametrize("k", [300, 120])
def test_one_token_is_in_the_nucleus_if_it_is_among_those_that_are_kept(top_p: float, k: int) -> None:
    x = random_logits(1, seed=4)[0]
    weights = Weights.of(x, float(x.max()), 1.3, k, 0.01, np.empty_like(x))
    tokens = np.flatnonzero(weights.values).tolist()
    inside = [token for token in tokens if weights.in_nucleus(token, top_p)]
    weights.keep_nucleus(top_p)
    assert np.flatnonzero(weights.values).tolist() == inside
    assert np.array_equal(weights.sums, lane_sums(weights.values))


def test_a_nucleus_of_listed_tokens_has_at_least_one() -> None:
    inside = nucleus_mask(np.tile([0.5, 0.3, 0.1], (4, 1)), np.array([1e-9, 0.85, 0.99, 1.0]))
    assert inside.tolist() == [[True, False, False], [True, True, False], [True, True, True], [True, True, True]]
    assert nucleus_mask(np.array([[1.0, 1e-20]]), np.array([1.0])).all(), "without top-p nothing is lost to rounding"


def test_bad_words_equal_a_plain_search() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        words = [rng.integers(0, 3, rng.integers(1, 5)).tolist() for _ in range(6)]
        output = rng.integers(0, 3, rng.integers(0, 7))
        text = output.tolist()
        expected = {w[-1] for w in words if len(w) - 1 <= len(text) and text[len(text) - len(w) + 1 :] == w[:-1]}
        bad = BadWords.of(words)
        assert set(bad.forbidden(output).tolist()) == expected
        assert BadWords.of(bad) is bad
        assert list(bad) == words


@pytest.mark.parametrize("place", ["in the logits", "in a copy"])
def test_cells_are_those_of_their_rows(place: str) -> None:
    dtype = torch.float32 if place == "in the logits" else torch.float64
    logits = torch.arange(40, dtype=dtype).reshape(4, 10)
    work = WorkingRows.of(logits, 8, np.array([1, 3]), written=True)
    assert (work.x.data_ptr() == logits.data_ptr()) == (place == "in the logits")
    cells, values = work.cells([3, 1], [np.array([0, 9, 7]), np.array([-1, 2, 2**31])], np.arange(6))
    assert work.x.view(-1)[cells].tolist() == [30, 37, 12]
    assert values.tolist() == [0, 2, 4]


def test_penalties_of_rows_that_know_nothing() -> None:
    """No tokens, or none with a logit: nothing happens."""
    params = [SamplingParams(presence_penalty=1.0, repetition_penalty=2.0)] * 2
    logits = torch.from_numpy(random_logits(2))
    before = logits.clone()
    batch = batch_of(params, prompts=[[], [300]], outputs=[[], [301]])
    apply_penalties(WorkingRows.of(logits, 300, np.arange(2), written=True), batch, np.arange(2))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("measure", [logprobs._measure_on_host, logprobs._measure_on_device])
def test_logprobs_equal_the_definition(measure: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_measure_on_host", measure)
    raw = random_logits(4, seed=5)
    raw[2, 40:] = -np.inf
    tokens, counts = np.array([7, 299, 3, 300]), [0, 3, 20, 1]
    for row, entry in enumerate(logprobs_of(torch.from_numpy(raw), tokens, counts)):
        x = raw[row].astype(np.float64)
        logs = np.append(x - np.log(np.exp(x).sum()), -np.inf)
        best = [i for i in np.argsort(-x, kind="stable")[: counts[row]].tolist() if i != tokens[row]]
        assert entry.token_ids == [tokens[row], *best]
        assert np.allclose(entry.logprobs, logs[entry.token_ids], atol=1e-5)
        assert entry.rank == 1 + np.count_nonzero(logs > logs[tokens[row]])
