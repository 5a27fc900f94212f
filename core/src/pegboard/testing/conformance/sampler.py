"""What every sampler must keep: rows stand alone, equal maxima go to the lowest id, draws follow their distribution.

Subclass ``SamplerConformance`` and give ``make``. The class needs numpy and torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pegboard.testing.conformance._sampler_base import GREEDY, Recorder
from pegboard.testing.conformance._sampler_constraints import ConstraintTests
from pegboard.testing.conformance._sampler_order import OrderTests
from pegboard.testing.sampling_batches import VOCAB, batch_of, grammar_mask, random_logits
from pegboard.wire import SamplingParams

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


@dataclass(frozen=True)
class Row:
    """One row of the test of independence."""

    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: tuple[int, ...] = ()


def _rows() -> list[Row]:
    """Every option alone, and many together."""
    evens = tuple(range(0, VOCAB, 2))
    rows = [Row(params) for params in MIXED]
    for temperature in (0.0, 1.1):
        plain = SamplingParams(temperature=temperature, seed=12)
        many = {"logit_bias": {50: 3.0}, "allowed_token_ids": evens, "min_tokens": 5, "presence_penalty": -0.5, "top_p": 0.95}
        rows += [
            Row(SamplingParams(temperature=temperature, seed=13, logit_bias={3: 4.0, 299: 3.5})),
            Row(SamplingParams(temperature=temperature, seed=14, allowed_token_ids=evens, logprobs=2)),
            Row(SamplingParams(temperature=temperature, seed=15, min_tokens=4)),
            Row(plain, bad_words=((5,), (21, 22), (20, 20, 7))),
            Row(plain, grammar=evens),
            Row(plain),
            Row(SamplingParams(temperature=temperature, seed=16, **many), bad_words=((9,),), grammar=evens),  # type: ignore[arg-type]
        ]
    return rows


ROWS = _rows()


class SamplerConformance(ConstraintTests, OrderTests):
    """The contract of ``pegboard.contracts.sampler``, as tests."""

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
        """Alone, in any order and among any others: same token, same log probabilities, bit by bit."""
        n = len(ROWS)
        logits = random_logits(n, seed=1)
        processors = [Recorder({8: 1.5}, only={0, 3, 20}), Recorder({}, invariant=True, only={5, 21, 22})]

        def run(rows: list[int]) -> list[tuple[int, Any]]:
            batch = batch_of(
                [ROWS[r].params for r in rows],
                prompts=[[1, 2, 3, 10 + r] for r in rows],
                outputs=[[20 + r] * (1 + r % 3) for r in rows],
                stop_token_ids=[[r, 30] for r in rows],
                bad_words={i: ROWS[r].bad_words for i, r in enumerate(rows) if ROWS[r].bad_words},
                grammar_masks={i: grammar_mask(ROWS[r].grammar) for i, r in enumerate(rows) if ROWS[r].grammar},
                processors=processors,
                slots=rows,
            )
            output = self.run(logits[rows], batch)
            assert not output.errors
            return [(int(output.token_ids[i]), output.logprobs.get(i)) for i in range(len(rows))]

        alone = [run([row])[0] for row in range(n)]
        assert run(list(range(n))) == alone
        assert run(list(reversed(range(n)))) == alone[::-1]
        assert run([2, 6, 9]) == [alone[2], alone[6], alone[9]]
        shuffled = np.random.default_rng(0).permutation(n)[: n // 2].tolist()
        assert run(shuffled) == [alone[row] for row in shuffled]

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
        self.check_frequencies(random_logits(1, seed=3)[0], params)

    @pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.5}])
    def test_equal_logits_are_kept_by_rising_id(self, options: dict[str, Any]) -> None:
        """Of equal ones at the end of what top-k or top-p keep, those with the lowest ids stay."""
        logits = np.full(VOCAB, -50.0, np.float32)
        logits[[10, 60, 110, 160, 210, 260, 299, 40]] = 2.0
        self.check_frequencies(logits, SamplingParams(**options))

    @pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"logprobs": 3}])
    def test_extreme_logits(self, options: dict[str, Any]) -> None:
        """The float32 range, masked logits, and one id left: a token, never an overflow."""
        logits = np.full((4, VOCAB), -np.inf, np.float32)
        logits[0, [5, 9]] = 1e4, 1e4 - 0.1
        logits[1, [5, 9]] = 3e38, -3e38
        logits[2, 7] = -3e38
        logits[3] = -1e30
        logits[3, 3] = -1e29
        params = [SamplingParams(temperature=t, seed=3, **options) for t in (1e-3, 1.0, 2e-4, 0.5)]
        assert self.tokens(logits, batch_of(params)) == [5, 5, 7, 3]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_vocabulary_of_one(self, temperature: float) -> None:
        params = [SamplingParams(temperature=temperature, seed=1, top_k=k, top_p=p) for k, p in ((0, 1.0), (1, 0.5), (7, 0.9))]
        assert self.tokens(np.zeros((3, 1), np.float32), batch_of(params, prompts=[[0]] * 3, vocab_limit=1)) == [0, 0, 0]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_half_precision_logits(self, temperature: float) -> None:
        """Exact in bfloat16, so that both types must give the same."""
        import torch

        logits = np.round(random_logits(6, seed=8) * 4) / 4
        params = [
            SamplingParams(temperature=temperature, seed=row, presence_penalty=0.5, logit_bias={9: 3.0}) for row in range(5)
        ]
        batch = batch_of([*params, GREEDY], outputs=[[4]] * 6)
        half = self.make().sample(torch.from_numpy(logits).to(torch.bfloat16), batch)
        assert half.token_ids.tolist() == self.tokens(logits, batch)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_logits_that_are_no_numbers_fail_their_row_alone(self, bad: float) -> None:
        logits = random_logits(3)
        logits[1, 42] = bad
        for options in ({"temperature": 0.0}, {"top_p": 0.9, "seed": 1, "logprobs": 2}, {"top_k": 9, "presence_penalty": 1.0}):
            params = SamplingParams(**options)  # type: ignore[arg-type]
            output = self.run(logits, batch_of([params] * 3, outputs=[[5]] * 3))
            assert set(output.errors) == {1}
            assert 1 not in output.logprobs
            good = self.run(logits[[0, 2]], batch_of([params] * 2, outputs=[[5]] * 2))
            assert output.token_ids[[0, 2]].tolist() == good.token_ids.tolist()

    def test_a_nan_is_not_hidden_by_forbidding_its_id(self) -> None:
        logits = random_logits(4)
        logits[:, 42] = np.nan
        params = [SamplingParams(allowed_token_ids=(1, 2)), GREEDY, SamplingParams(min_tokens=1), GREEDY]
        batch = batch_of(params, stop_token_ids=[[42]] * 4, bad_words={1: [[42]]}, grammar_masks={3: grammar_mask([7])})
        assert set(self.run(logits, batch).errors) == {0, 1, 2, 3}

    def test_ids_from_the_limit_on_are_never_chosen_or_listed(self) -> None:
        logits = random_logits(3)
        logits[:, 200:] += 50.0
        params = [SamplingParams(temperature=t, top_k=k, seed=1, logprobs=20) for t, k in ((0.0, 0), (2.0, 250), (2.0, 0))]
        output = self.run(logits, batch_of(params, vocab_limit=200))
        assert (output.token_ids < 200).all()
        assert all(max(entry.token_ids) < 200 for entry in output.logprobs.values())

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
