from __future__ import annotations

import numpy as np
import pytest
import torch

from pegboard.contracts.sampler import Sampler, SamplingBatch
from pegboard.testing.conformance.sampler import SamplerConformance
from pegboard.testing.sampling_batches import batch_of, grammar_mask, random_logits
from pegboard.wire import SamplingParams
from pegboard_plugins.sampling import sampler as module
from pegboard_plugins.sampling.sampler import DefaultSampler

from .random_batches import random_batch


class TestDefaultSampler(SamplerConformance):
    def make(self) -> Sampler:
        return DefaultSampler()


@pytest.mark.usefixtures("device_code")
class TestDeviceCode(SamplerConformance):
    def make(self) -> Sampler:
        return DefaultSampler()


def sample(logits: np.ndarray, batch: SamplingBatch) -> module.SamplerOutput:
    return DefaultSampler().sample(torch.from_numpy(np.array(logits, np.float32)), batch)


@pytest.mark.parametrize("seed", range(100, 106))
def test_rows_of_mixed_batches_stand_alone(seed: int) -> None:
    """Bit by bit: each row of a batch with every option gives what it gives in a batch of its own."""
    logits, batch = random_batch(np.random.default_rng(seed), rows=12, vocab=5000)
    together = sample(logits, batch)
    for row in range(12):
        one = _alone(batch, row)
        alone = sample(logits[row : row + 1], one)
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.logprobs.get(0) == together.logprobs.get(row)
        assert alone.errors.get(0) == together.errors.get(row)


def _alone(batch: SamplingBatch, row: int) -> SamplingBatch:
    dense = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seeds",
             "positions", "num_logprobs", "min_tokens", "slots", "num_tokens", "prompt_lens")  # fmt: skip
    sparse = ("token_counts", "logit_bias", "allowed_token_ids", "bad_words", "grammar_masks")
    return SamplingBatch(
        **{name: getattr(batch, name)[row : row + 1] for name in dense},
        **{name: {0: column[row]} if row in (column := getattr(batch, name)) else {} for name in sparse},
        stop_token_ids=[batch.stop_token_ids[row]],
        token_ids=batch.token_ids,
        vocab_limit=batch.vocab_limit,
        processors=batch.processors,
    )


@pytest.mark.parametrize("cut", ["nothing", "top_p", "top_k", "min_p"])
def test_last_bits_of_the_logits_do_not_change_draws(cut: str) -> None:
    """Batch shapes and chunks change rounding; a seeded request must not notice."""
    rows = 2000
    logits = np.random.default_rng(33).normal(0, 2, 4000).astype(np.float32)
    ordered = np.sort(logits)[::-1]
    clear = 20 + int(np.argmax(ordered[19:60] - ordered[20:61]))  # a cut between close candidates is anybody's guess
    options = {"nothing": {}, "top_p": {"top_p": 0.9}, "top_k": {"top_k": clear}, "min_p": {"min_p": 0.1}}[cut]
    noise = np.random.default_rng(5).normal(0, 1e-5, (rows, 4000)).astype(np.float32)
    batch = batch_of([SamplingParams(**options)] * rows, seeds=range(rows), vocab_limit=4000)  # type: ignore[arg-type]
    exact, noisy = sample(np.tile(logits, (rows, 1)), batch), sample(np.tile(logits, (rows, 1)) + noise, batch)
    assert np.count_nonzero(exact.token_ids != noisy.token_ids) <= 2


def test_a_draw_without_top_p_stays_with_it_where_it_is_in_the_nucleus() -> None:
    rows = 500
    logits = np.tile(random_logits(1, seed=7, vocab=5000) * 3, (rows, 1))
    free, cut = (
        sample(logits, batch_of([SamplingParams(top_p=p)] * rows, seeds=range(rows), vocab_limit=5000)).token_ids
        for p in (1.0, 0.9)
    )
    kept = np.isin(free, cut)
    assert np.array_equal(free[kept], cut[kept])
    assert 0.8 < kept.mean() < 1


@pytest.mark.parametrize(
    ("params", "extra", "said"),
    [
        (
            SamplingParams(allowed_token_ids=(3, 4)),
            {"grammar_masks": {0: grammar_mask([5])}},
            ["allowed_token_ids (2 ids)", "grammar"],
        ),
        (
            SamplingParams(min_tokens=3),
            {"grammar_masks": {0: grammar_mask([9])}, "stop_token_ids": [[9]]},
            ["min_tokens=3", "stop ids 9"],
        ),
        (SamplingParams(temperature=0.0), {"bad_words": {0: [[i] for i in range(300)]}}, ["bad_words"]),
    ],
)
def test_the_error_of_a_row_without_tokens_says_what_is_in_force(
    params: SamplingParams, extra: dict[str, object], said: list[str]
) -> None:
    output = sample(random_logits(1), batch_of([params], **extra))  # type: ignore[arg-type]
    assert output.token_ids.tolist() == [-1]
    assert all(part in output.errors[0] for part in ["no token is allowed", *said])
    assert ("bad_words" in output.errors[0]) == ("bad_words" in said)


def test_a_model_that_masks_everything_is_blamed_itself() -> None:
    output = sample(np.full((1, 300), -np.inf), batch_of([SamplingParams(seed=1)]))
    assert output.errors == {0: "no token is allowed: every logit of the model is -inf; check the weights"}


def test_rows_that_only_want_their_highest_logit_are_not_written() -> None:
    logits = torch.from_numpy(random_logits(4))
    before = logits.clone()
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(allowed_token_ids=(1,)),
        SamplingParams(temperature=0.0),
        SamplingParams(),
    ]
    DefaultSampler().sample(logits, batch_of(params))
    assert torch.equal(logits[[0, 2, 3]], before[[0, 2, 3]])
    assert not torch.equal(logits[1], before[1])


@pytest.mark.parametrize("top_k", [0, 5])
def test_min_p_is_exact(top_k: int) -> None:
    """Right below the limit is out, right on it is in; here after a search by a bound that is only nearly exact."""
    logits = np.full((300, 5000), -50.0, np.float32)
    logits[:, [7, 9]] = 0.0, np.log(0.5) - 4e-6
    logits[200:, 9] = 0.0
    params = [SamplingParams(min_p=0.5, top_k=top_k)] * 200 + [SamplingParams(min_p=1.0, top_k=top_k)] * 100
    drawn = sample(logits, batch_of(params, seeds=range(300), vocab_limit=5000)).token_ids
    assert set(drawn[:200]) == {7}
    assert set(drawn[200:]) == {7, 9}


def test_an_empty_batch() -> None:
    output = sample(np.zeros((0, 300)), batch_of([]))
    assert output.token_ids.tolist() == []


def test_logits_of_any_layout() -> None:
    """Not contiguous, repeated rows that share memory, part of a graph: nothing of it may leak into a neighbour."""
    x = torch.from_numpy(random_logits(3, seed=9))
    params = [SamplingParams(seed=row, logit_bias={row: 30.0}) for row in range(3)]
    expected = DefaultSampler().sample(x.clone(), batch_of(params)).token_ids.tolist()
    assert DefaultSampler().sample(x.t().contiguous().t(), batch_of(params)).token_ids.tolist() == expected
    assert DefaultSampler().sample(x.clone().requires_grad_(), batch_of(params)).token_ids.tolist() == expected
    shared = x[:1].expand(3, -1)
    assert DefaultSampler().sample(shared, batch_of(params)).token_ids.tolist() == [0, 1, 2]


def test_extreme_but_legal_parameters_give_a_token() -> None:
    params = [
        SamplingParams(temperature=1e6, seed=0),
        SamplingParams(temperature=2e-4, seed=0, top_p=1e-9),
        SamplingParams(temperature=1.0, min_p=1.0, seed=0),
        SamplingParams(temperature=1.0, top_k=10**6, top_p=0.999999, seed=2**64 - 1),
        SamplingParams(repetition_penalty=1e3, frequency_penalty=-2.0, seed=-1),
    ]
    output = sample(random_logits(5), batch_of(params, outputs=[[3] * 1000] * 5))
    assert not output.errors
    assert ((output.token_ids >= 0) & (output.token_ids < 300)).all()
