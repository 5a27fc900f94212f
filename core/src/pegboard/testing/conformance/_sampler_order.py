"""The order of operations, and what each of them looks at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegboard.testing.conformance._sampler_base import DRAWS, GREEDY, Recorder, SamplerTests, flat
from pegboard.testing.reference_sampler import assert_distribution, reference_distribution, reference_logits
from pegboard.testing.sampling_batches import VOCAB, batch_of, grammar_mask, random_logits
from pegboard.wire import SamplingParams

NEVER = 50.0
"""Subtracted from logits that must not be drawn in a test of something else."""


class OrderTests(SamplerTests):
    def test_bias_comes_before_penalties(self) -> None:
        """(1 + 1) / 2 loses against 1.2, 1 / 2 + 1 would win."""
        params = SamplingParams(temperature=0.0, logit_bias={5: 1.0}, repetition_penalty=2.0)
        assert self.tokens(flat(t5=1.0, t6=1.2), batch_of([params], prompts=[[5]])) == [6]

    def test_processors_come_after_bias_and_before_penalties_in_their_order(self) -> None:
        first, second = Recorder({5: 1.0}), Recorder({5: 2.0})
        params = SamplingParams(temperature=0.0, logit_bias={5: 3.0}, repetition_penalty=2.0)
        batch = batch_of([params], prompts=[[5]], processors=[first, second])
        assert self.tokens(flat(t5=2.0, t6=4.5), batch) == [6]
        assert first.given[0][5] == 5.0
        assert second.given[0][5] == 6.0

    def test_argmax_invariant_processors_see_scaled_logits_of_random_rows_after_all_that_forbids(self) -> None:
        late = Recorder({}, invariant=True)
        params = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.5, seed=1, logit_bias={7: 1.0})]
        logits = random_logits(2, seed=41)
        batch = batch_of(params, bad_words={1: [[9]]}, processors=[late])
        self.tokens(logits, batch)
        assert list(late.given) == [1], "greedy rows are passed over"
        expected = reference_logits(logits[1], batch, 1) / 0.5
        assert late.given[1][9] == -np.inf
        assert np.allclose(late.given[1], expected, atol=1e-5)

    def test_argmax_invariant_processors_change_the_draw(self) -> None:
        """One that leaves nothing but the highest logit makes a row as good as greedy."""
        logits = random_logits(40, seed=42)
        best = logits.argmax(axis=1)
        late = Recorder({token: -NEVER * 9 for token in range(VOCAB) if token not in best}, invariant=True)
        params = [SamplingParams(temperature=2.0, seed=row) for row in range(40)]
        assert set(self.tokens(logits, batch_of(params, processors=[late]))) <= set(best.tolist())

    @pytest.mark.parametrize("in_place", [True, False])
    @pytest.mark.parametrize("invariant", [True, False])
    def test_processors_get_the_rows_that_concern_them_by_slot(self, invariant: bool, in_place: bool) -> None:
        logits = random_logits(4, seed=43)
        slots = [6, 2, 9, 0]
        recorder = Recorder({11: 100.0}, invariant=invariant, only={9, 6}, in_place=in_place)
        params = [SamplingParams(seed=row) for row in range(4)]
        batch = batch_of(params, slots=slots, processors=[recorder])
        chosen = self.tokens(logits, batch)
        assert sorted(recorder.given) == [6, 9]
        for row in (0, 2):
            assert np.array_equal(recorder.given[slots[row]], logits[row])
            assert chosen[row] == 11
        assert [chosen[1], chosen[3]] == self.tokens(logits[[1, 3]], batch_of([params[1], params[3]]))

    def test_a_processor_without_rows_costs_no_call(self) -> None:
        recorder = Recorder({5: 1.0}, only=set())
        logits = random_logits(3, seed=44)
        assert self.tokens(logits, batch_of([GREEDY] * 3, processors=[recorder])) == logits.argmax(axis=1).tolist()
        assert not recorder.given

    @pytest.mark.parametrize(
        ("options", "support"),
        [
            ({"top_p": 0.5, "top_k": 2}, {0}),  # 0.4 of 0.7 reaches a half, 0.4 of 1 would not
            ({"top_p": 0.5, "min_p": 0.6}, {0}),
            ({"top_p": 0.6, "top_k": 3}, {0, 1}),
            ({"top_p": 0.9, "top_k": 4, "min_p": 0.3}, {0, 1, 2}),
            ({"top_k": 3, "min_p": 0.6}, {0, 1}),
        ],
    )
    def test_top_p_is_a_share_of_what_min_p_and_top_k_left(self, options: dict[str, Any], support: set[int]) -> None:
        logits = np.full((400, VOCAB), -NEVER, np.float32)
        logits[:, :4] = np.log([0.4, 0.3, 0.2, 0.1])
        batch = batch_of([SamplingParams(**options)] * 400, seeds=range(400))
        assert set(self.tokens(logits, batch)) == support

    @pytest.mark.parametrize("presence", [-2.0, 0.0, 2.0])
    @pytest.mark.parametrize("frequency", [-2.0, 0.0, 2.0])
    @pytest.mark.parametrize("repetition", [0.5, 1.0, 1.8])
    def test_penalties_look_at_the_right_tokens(self, presence: float, frequency: float, repetition: float) -> None:
        """Presence and frequency at the output, repetition at the prompt too; neither padding nor batch mates count. Measured by
        how far the others have to be raised to win."""
        penalties: dict[str, Any] = {
            "presence_penalty": presence,
            "frequency_penalty": frequency,
            "repetition_penalty": repetition,
        }
        prompts = [[5] * 10 + [6], [5] * 10 + [6], [8] * 60]
        outputs: list[list[int]] = [[], [7, 7, 7, 5], [9] * 30]
        logits = flat(3, t5=3.0, t6=-1.0, t7=2.5)
        params = [SamplingParams(temperature=0.0, **penalties)] * 3
        batch = batch_of(params, prompts=prompts, outputs=outputs)
        for row in range(2):
            expected = reference_logits(logits[row], batch, row)
            for token in (5, 6, 7, 10):
                for margin, winner in ((-1e-3, token), (1e-3, 20)):
                    raised: dict[str, Any] = {
                        "logit_bias": {20: float(expected[token]) + margin},
                        "allowed_token_ids": (token, 20),
                    }
                    probe = [SamplingParams(temperature=0.0, **penalties, **raised), *params[1:]]
                    known = batch_of(probe, prompts=[prompts[row], *prompts[1:]], outputs=[outputs[row], *outputs[1:]])
                    assert self.tokens(logits, known)[0] == winner

    @pytest.mark.parametrize(
        ("options", "context"),
        [
            ({"logit_bias": {3: 4.0, 50: 3.0, 200: -5.0}}, {}),
            ({"temperature": 1.4, "presence_penalty": 1.5, "frequency_penalty": 0.5}, {"outputs": [4, 4, 9, 250]}),
            ({"repetition_penalty": 1.7}, {"prompts": list(range(0, VOCAB, 2)), "outputs": [1, 1, 3]}),
            (
                {
                    "temperature": 0.8,
                    "top_k": 60,
                    "top_p": 0.95,
                    "min_p": 0.01,
                    "frequency_penalty": -0.7,
                    "logit_bias": {8: 2.0},
                },
                {"prompts": [8, 9], "outputs": [8, 30, 30]},
            ),
        ],
    )
    def test_frequencies_after_changes(self, options: dict[str, Any], context: dict[str, Any]) -> None:
        self.check_frequencies(random_logits(1, seed=45)[0], SamplingParams(**options), **context)

    def test_processors_and_frequencies(self) -> None:
        early, late = Recorder({4: 3.0}), Recorder({6: 2.0}, invariant=True)
        logits = random_logits(1, seed=46)[0]
        logits[100] = 12.0  # so that the late one leaves the highest where it was
        params = SamplingParams(temperature=3.0)
        batch = batch_of([params] * DRAWS, seeds=range(DRAWS), processors=[early, late])
        drawn = np.array(self.tokens(np.repeat(logits[None], DRAWS, axis=0), batch))
        assert_distribution(drawn, reference_distribution(logits, batch, 0))

    def test_logprobs_are_those_of_the_raw_logits_whatever_happens_to_them(self) -> None:
        logits = random_logits(3, seed=47)
        params = [
            SamplingParams(temperature=0.0, logprobs=2, logit_bias={5: 50.0}),
            SamplingParams(seed=1, logprobs=2, presence_penalty=2.0, allowed_token_ids=(5, 6)),
            SamplingParams(seed=2, logprobs=2, temperature=3.0),
        ]
        batch = batch_of(params, outputs=[[5]] * 3, grammar_masks={2: grammar_mask([5])}, processors=[Recorder({7: 9.0})])
        output = self.run(logits, batch)
        raw = logits.astype(np.float64)
        raw -= np.log(np.exp(raw).sum(axis=1, keepdims=True))
        for row in range(3):
            entry, token = output.logprobs[row], int(output.token_ids[row])
            best = sorted(range(VOCAB), key=lambda i, row=row: (-logits[row, i], i))[:2]  # type: ignore[misc]
            assert entry.token_ids == [token, *(i for i in best if i != token)]
            assert np.allclose(entry.logprobs, raw[row, entry.token_ids], atol=1e-5)
