"""What every sampler must keep: rows stand alone, equal maxima go to the lowest id, draws follow their distribution.

Subclass ``SamplerConformance`` and give ``make``. The class needs numpy and torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegboard.contracts.sampler import Sampler, SamplerOutput, SamplingBatch
from pegboard.wire import SamplingParams

VOCAB = 300


def batch_of(
    params: list[SamplingParams],
    *,
    prompts: list[list[int]] | None = None,
    outputs: list[list[int]] | None = None,
    stop_token_ids: list[list[int]] | None = None,
    seeds: list[int] | None = None,
    vocab_limit: int = VOCAB,
) -> SamplingBatch:
    """A ``SamplingBatch`` of one row per entry of ``params``; prompts default to [1], outputs to none."""
    n = len(params)
    prompts = prompts or [[1]] * n
    outputs = outputs or [[]] * n
    known = [p + o for p, o in zip(prompts, outputs, strict=True)]
    tokens = np.full((n, max(map(len, known))), 7, np.int32)  # 7: padding that must have no effect
    for row, ids in enumerate(known):
        tokens[row, : len(ids)] = ids

    def column(name: str, dtype: Any) -> Any:
        return np.array([getattr(p, name) for p in params], dtype)

    return SamplingBatch(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        repetition_penalty=column("repetition_penalty", np.float32),
        presence_penalty=column("presence_penalty", np.float32),
        frequency_penalty=column("frequency_penalty", np.float32),
        seeds=np.array(seeds or [p.seed or 0 for p in params], np.uint64),
        positions=np.array([len(o) for o in outputs], np.int32),
        num_logprobs=np.array([-1 if p.logprobs is None else p.logprobs for p in params], np.int32),
        min_tokens=column("min_tokens", np.int32),
        stop_token_ids=stop_token_ids or [[]] * n,
        slots=np.arange(n),
        token_ids=tokens,
        num_tokens=np.array([len(ids) for ids in known], np.int32),
        prompt_lens=np.array([len(p) for p in prompts], np.int32),
        vocab_limit=vocab_limit,
    )


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Any:
    """[rows, vocab] float32, with many equal values (multiples of 1/8), as bfloat16 logits have."""
    rng = np.random.default_rng(seed)
    return (np.round(rng.normal(0, 2, (rows, vocab)) * 8) / 8).astype(np.float32)


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=3),
    SamplingParams(temperature=1.3, top_k=5, seed=4),
    SamplingParams(temperature=1.0, top_p=0.6, seed=5),
    SamplingParams(temperature=2.0, top_p=0.99, seed=6),
    SamplingParams(temperature=1.0, min_p=0.2, seed=7),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.8, min_p=0.01, seed=8),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(temperature=1.0, repetition_penalty=1.2, seed=9, logprobs=3),
    SamplingParams(temperature=0.0, logprobs=0),
]


class SamplerConformance:
    """The contract of ``pegboard.contracts.sampler``, as tests."""

    def make(self) -> Sampler:
        """A fresh sampler."""
        raise NotImplementedError("a subclass gives the sampler under test")

    def run(self, logits: Any, batch: SamplingBatch) -> SamplerOutput:
        import torch

        return self.make().sample(torch.from_numpy(np.array(logits, np.float32)), batch)

    def test_greedy_takes_the_first_of_equal_maxima(self) -> None:
        logits = np.zeros((3, VOCAB), np.float32)
        logits[0, [250, 17, 90]] = 4.0
        logits[2, [VOCAB - 1]] = 1.0
        output = self.run(logits, batch_of([SamplingParams(temperature=0.0)] * 3))
        assert output.token_ids.tolist() == [17, 0, VOCAB - 1]

    @pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-6, 1e-4])
    def test_tiny_temperatures_are_greedy(self, temperature: float) -> None:
        logits = random_logits(6)
        params = [SamplingParams(temperature=temperature, top_p=0.9, top_k=7, min_p=0.1, logprobs=1)] * 6
        output = self.run(logits, batch_of(params))
        assert output.token_ids.tolist() == logits.argmax(axis=1).tolist()
        assert all(np.isfinite(entry.logprobs).all() for entry in output.logprobs.values())

    def test_a_row_does_not_depend_on_its_neighbours(self) -> None:
        n = len(MIXED)
        logits = random_logits(n, seed=1)
        prompts = [[1, 2, 3, 10 + row] for row in range(n)]
        outputs = [[20 + row] * (1 + row % 3) for row in range(n)]

        def run(rows: list[int]) -> list[tuple[int, Any]]:
            batch = batch_of([MIXED[r] for r in rows], prompts=[prompts[r] for r in rows], outputs=[outputs[r] for r in rows])
            output = self.run(logits[rows], batch)
            return [(int(output.token_ids[i]), output.logprobs.get(i)) for i in range(len(rows))]

        alone = [run([row])[0] for row in range(n)]
        assert run(list(range(n))) == alone
        assert run(list(reversed(range(n)))) == alone[::-1]
        assert run([2, 6, 9]) == [alone[2], alone[6], alone[9]]

    def test_draws_follow_seed_and_position_alone(self) -> None:
        logits = np.repeat(random_logits(1, seed=2), 2, axis=0)
        params = [SamplingParams(temperature=1.5, seed=11), SamplingParams(temperature=1.5, seed=12)]
        first = self.run(logits, batch_of(params, outputs=[[5] * 4, [5] * 4]))
        again = self.run(logits[::-1], batch_of(params[::-1], outputs=[[9] * 4, [8] * 4]))
        assert first.token_ids.tolist() == again.token_ids.tolist()[::-1]
        drawn = {int(self.run(logits, batch_of(params, outputs=[[5] * i, [5] * i])).token_ids[0]) for i in range(20)}
        assert len(drawn) > 5, "the position must change the draw"

    @pytest.mark.parametrize("params", MIXED[1:7])
    def test_frequencies_match_the_distribution(self, params: SamplingParams) -> None:
        logits = random_logits(1, seed=3)[0]
        draws = 4000
        batch = batch_of([params] * draws, seeds=list(range(draws)))
        drawn = self.run(np.repeat(logits[None], draws, axis=0), batch).token_ids
        assert_distribution(drawn, reference_distribution(logits, params))

    def test_nan_fails_its_row_alone(self) -> None:
        logits = random_logits(3)
        logits[1, 42] = np.nan
        for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9, seed=1, logprobs=2)):
            output = self.run(logits, batch_of([params] * 3))
            assert set(output.errors) == {1}
            good = self.run(logits[[0, 2]], batch_of([params] * 2))
            assert output.token_ids[[0, 2]].tolist() == good.token_ids.tolist()

    def test_ids_from_the_limit_on_are_never_chosen_or_listed(self) -> None:
        logits = random_logits(3)
        logits[:, 200:] += 50.0
        params = [SamplingParams(temperature=t, top_k=k, seed=1, logprobs=20) for t, k in ((0.0, 0), (2.0, 250), (2.0, 0))]
        output = self.run(logits, batch_of(params, vocab_limit=200))
        assert (output.token_ids < 200).all()
        assert all(max(entry.token_ids) < 200 for entry in output.logprobs.values())

    def test_min_tokens_forbids_stop_ids_until_then(self) -> None:
        logits = random_logits(2)
        logits[:, [30, 31]] = 60.0
        params = [SamplingParams(temperature=0.0, min_tokens=2, max_tokens=9), SamplingParams(seed=1, min_tokens=2, max_tokens=9)]
        for length in range(4):
            batch = batch_of(params, outputs=[[5] * length] * 2, stop_token_ids=[[30, 31]] * 2)
            stopped = [token in (30, 31) for token in self.run(logits, batch).token_ids.tolist()]
            assert stopped == [length >= 2] * 2

    def test_penalties_look_at_the_right_tokens(self) -> None:
        logits = np.zeros((4, VOCAB), np.float32)
        logits[:, 5], logits[:, 6] = 3.0, 2.5
        params = [
            SamplingParams(temperature=0.0, presence_penalty=2.0),
            SamplingParams(temperature=0.0, frequency_penalty=2.0),
            SamplingParams(temperature=0.0, repetition_penalty=2.0),
            SamplingParams(temperature=0.0, presence_penalty=-2.0),
        ]
        prompt_only = batch_of(params, prompts=[[5] * 10] * 4)
        assert self.run(logits, prompt_only).token_ids.tolist() == [5, 5, 6, 5]
        with_output = batch_of(params, prompts=[[1]] * 4, outputs=[[5], [5], [5], [6]])
        assert self.run(logits, with_output).token_ids.tolist() == [6, 6, 6, 6]

    def test_logprobs_are_of_the_raw_logits(self) -> None:
        logits = random_logits(4, seed=5)
        params = [
            SamplingParams(temperature=1.5, seed=row, presence_penalty=2.0, logprobs=k) for row, k in enumerate((0, 1, 5, 20))
        ]
        output = self.run(logits, batch_of(params, outputs=[[3]] * 4))
        raw = logits.astype(np.float64)
        expected = raw - np.log(np.exp(raw - raw.max(1, keepdims=True)).sum(1, keepdims=True)) - raw.max(1, keepdims=True)
        for row, k in enumerate((0, 1, 5, 20)):
            entry, token = output.logprobs[row], int(output.token_ids[row])
            best = sorted(range(VOCAB), key=lambda i, row=row: (-raw[row, i], i))[:k]  # type: ignore[misc]
            assert entry.token_ids == [token, *(i for i in best if i != token)]
            assert np.allclose(entry.logprobs, expected[row, entry.token_ids], atol=1e-5)
            assert entry.rank == 1 + int((raw[row] > raw[row, token]).sum())


def reference_distribution(logits: Any, params: SamplingParams) -> Any:
    """Probabilities [V] by the definitions, in float64 with a plain sort: min-p, then top-k, then top-p."""
    scaled = logits.astype(np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    p[p < params.min_p] = 0.0
    order = np.argsort(-p, kind="stable")
    if params.top_k > 0:
        p[order[params.top_k :]] = 0.0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p]] = 0.0
    return p / p.sum()


def assert_distribution(drawn: Any, expected: Any) -> None:
    """Chi-square over ids with at least 5 expected draws (the others pooled), at six standard deviations of its statistic."""
    assert (expected[drawn] > 0).all(), "a token outside the support was drawn"
    counts = np.bincount(drawn, minlength=len(expected)).astype(np.float64)
    wanted = expected * len(drawn)
    large = wanted >= 5
    observed = np.append(counts[large], counts[~large].sum())
    ideal = np.append(wanted[large], wanted[~large].sum())
    observed, ideal = observed[ideal > 0], ideal[ideal > 0]
    statistic = ((observed - ideal) ** 2 / ideal).sum()
    freedom = len(observed) - 1
    assert statistic < freedom + 6 * np.sqrt(2 * freedom) + 6, f"chi-square {statistic:.1f} at {freedom} degrees of freedom"
