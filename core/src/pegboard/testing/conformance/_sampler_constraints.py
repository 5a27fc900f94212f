"""What may not be chosen is never chosen, whatever else is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegboard.testing.conformance._sampler_base import GREEDY, Recorder, SamplerTests, flat
from pegboard.testing.sampling_batches import VOCAB, batch_of, grammar_mask, random_logits
from pegboard.wire import SamplingParams


class ConstraintTests(SamplerTests):
    @pytest.mark.parametrize("temperature", [0.0, 1.5])
    def test_only_allowed_ids_are_chosen(self, temperature: float) -> None:
        allowed = (3, 40, 41, VOCAB - 1)
        params = [SamplingParams(temperature=temperature, allowed_token_ids=allowed, seed=seed) for seed in range(200)]
        logits = random_logits(200, seed=31)
        logits[:, allowed] -= 20.0
        chosen = self.tokens(logits, batch_of(params))
        assert set(chosen) <= set(allowed)
        if temperature == 0:
            assert chosen == [allowed[i] for i in logits[:, allowed].argmax(axis=1)]

    def test_draws_among_allowed_ids_follow_their_weights(self) -> None:
        params = SamplingParams(temperature=1.3, allowed_token_ids=tuple(range(0, VOCAB, 7)))
        self.check_frequencies(random_logits(1, seed=32)[0], params)

    def test_ids_without_a_logit_have_no_effect(self) -> None:
        """Requests are checked against the model's vocabulary; where one slips by, no row may fail, nor its neighbour be hit."""
        far = (VOCAB, VOCAB + 5, 2**31 - 1)
        params = [
            SamplingParams(temperature=0.0, allowed_token_ids=(5, *far)),
            SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(far, 100.0)),
            SamplingParams(temperature=0.0, min_tokens=1),
            SamplingParams(temperature=0.0, repetition_penalty=2.0, presence_penalty=1.0),
            GREEDY,
        ]
        logits = random_logits(5, seed=33)
        batch = batch_of(params, stop_token_ids=[list(far)] * 5, prompts=[[1, VOCAB + 3]] * 5, bad_words={4: [[t] for t in far]})
        expected = logits.argmax(axis=1).tolist()
        assert self.tokens(logits, batch) == [5, *expected[1:]]
        beyond = batch_of([SamplingParams(temperature=0.0, logit_bias={250: 100.0})], vocab_limit=200)
        assert self.tokens(logits[:1], beyond) == [int(logits[0, :200].argmax())]

    @pytest.mark.parametrize(
        ("output", "expected"),
        [([], 12), ([11], 11), ([12, 11], 11), ([11, 9], 12), ([20], 12), ([20, 12], 11), ([12], 12)],
    )
    def test_bad_words_of_several_tokens_are_forbidden_as_a_whole(self, output: list[int], expected: int) -> None:
        """Only the last token is, and only where all the others have just been said; 11, the first of a phrase, is allowed."""
        words = [[10], [11, 12], [20, 12, 12], [20, 12, 10]]
        batch = batch_of([GREEDY], outputs=[output], bad_words={0: words})
        assert self.tokens(flat(t10=9.0, t12=6.0, t11=5.0), batch) == [expected]

    def test_a_bad_word_that_overlaps_itself(self) -> None:
        logits = flat(t5=9.0, t6=8.0)
        chosen = [
            self.tokens(logits, batch_of([GREEDY], outputs=[output], bad_words={0: [[5, 6, 5, 6, 5]]}))[0]
            for output in ([6, 5, 6, 5, 6], [5, 6, 5], [6, 5, 6], [5, 6, 5, 6], [5, 5, 6, 5, 6])
        ]
        assert chosen == [6, 5, 5, 6, 6]
        repeated = batch_of([GREEDY], outputs=[[5, 5]], bad_words={0: [[5, 5, 5]]})
        assert self.tokens(logits, repeated) == [6]

    def test_bad_words_look_at_the_output_alone(self) -> None:
        """Whoever asks for a text without a phrase may have it in the prompt."""
        logits = flat(t12=5.0, t13=4.0)
        words = {0: [[11, 12]], 1: [[11, 12]]}
        batch = batch_of([GREEDY] * 2, prompts=[[1, 11], [1, 11]], outputs=[[], [11]], bad_words=words)
        assert self.tokens(np.repeat(logits, 2, axis=0), batch) == [12, 13]

    def test_many_bad_words_and_neighbours_without_any(self) -> None:
        logits = np.repeat(random_logits(1, seed=34), 3, axis=0)
        best = np.argsort(-logits[0], kind="stable")
        words = [[int(token)] for token in best[:200]]
        assert self.tokens(logits, batch_of([GREEDY] * 3, bad_words={1: words})) == [best[0], best[200], best[0]]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_grammar_masks_leave_what_their_bits_say(self, temperature: float) -> None:
        allowed = [[0], [31, 32, 64], [VOCAB - 1], list(range(VOCAB)), [7, 290]]
        logits = random_logits(5, seed=35)
        params = [SamplingParams(temperature=temperature, seed=row) for row in range(5)]
        masks = {row: grammar_mask(ids) for row, ids in enumerate(allowed) if row != 3}
        chosen = self.tokens(logits, batch_of(params, grammar_masks=masks))
        assert all(token in ids for token, ids in zip(chosen, allowed, strict=True))
        assert chosen[3] == self.tokens(logits[3:4], batch_of(params[3:4]))[0]
        if temperature == 0:
            assert chosen == [ids[int(logits[row, ids].argmax())] for row, ids in enumerate(allowed)]

    def test_draws_under_a_mask_follow_their_weights(self) -> None:
        mask = grammar_mask(range(0, VOCAB, 3))
        logits, masked = random_logits(1, seed=36)[0], np.full(VOCAB, -np.inf, np.float32)
        masked[::3] = logits[::3]
        params = SamplingParams(temperature=1.2, top_p=0.9)
        rows = 500
        batch = batch_of([params] * rows, seeds=range(rows), grammar_masks=dict.fromkeys(range(rows), mask))
        plain = batch_of([params] * rows, seeds=range(rows))
        assert self.tokens(np.repeat(logits[None], rows, 0), batch) == self.tokens(np.repeat(masked[None], rows, 0), plain)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("min_tokens", [0, 1, 3, 7])
    def test_min_tokens_holds_against_a_large_bias(self, min_tokens: int, temperature: float) -> None:
        """Exactly ``min_tokens`` tokens that are no end, then the end: for each of several end ids."""
        logits = random_logits(1, seed=37)
        for end in (30, 31):
            options: dict[str, Any] = {"logit_bias": {end: 100.0}, "min_tokens": min_tokens, "max_tokens": 24, "seed": 4}
            params = SamplingParams(temperature=temperature, presence_penalty=-2.0, **options)
            output: list[int] = []
            while not output or output[-1] not in (30, 31):
                output += self.tokens(logits, batch_of([params], outputs=[output], stop_token_ids=[[30, 31]]))
            assert len(output) == min_tokens + 1
            assert output[-1] == end

    def test_nothing_undoes_what_is_forbidden(self) -> None:
        """Neither bias nor processors nor negative penalties."""
        push = Recorder({9: 1000.0, 5: 1.0})
        own: list[dict[str, Any]] = [{"allowed_token_ids": (5, 6)}, {}, {}, {"min_tokens": 9, "max_tokens": 20}]
        params = [
            SamplingParams(temperature=0.0, logit_bias={9: 100.0}, presence_penalty=-2.0, frequency_penalty=-2.0, **options)
            for options in own
        ]
        batch = batch_of(
            params,
            outputs=[[9, 9, 9]] * 4,
            stop_token_ids=[[], [], [], [9]],
            bad_words={1: [[9]]},
            grammar_masks={2: grammar_mask([5, 6])},
            processors=[push],
        )
        assert self.tokens(flat(4), batch) == [5, 5, 5, 5]

    def test_constraints_hold_together(self) -> None:
        logits = np.repeat(flat(t1=9.0, t2=8.0, t3=7.0, t4=6.0, t5=5.0), 2, axis=0)
        params = [SamplingParams(temperature=0.0, allowed_token_ids=(1, 2, 3, 4), min_tokens=1), GREEDY]
        batch = batch_of(
            params,
            stop_token_ids=[[1], [1]],
            bad_words={0: [[2]]},
            grammar_masks={0: grammar_mask([1, 2, 4, 5]), 1: grammar_mask([5])},
        )
        assert self.tokens(logits, batch) == [4, 5]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_row_for_which_nothing_is_left_fails_alone(self, temperature: float) -> None:
        logits = random_logits(4, seed=38)
        plain = SamplingParams(temperature=temperature, seed=1)
        params = [plain, SamplingParams(temperature=temperature, allowed_token_ids=(3, 4), min_tokens=1, top_k=5), plain, plain]
        batch = batch_of(
            params,
            stop_token_ids=[[], [3, 4], [], []],
            grammar_masks={2: grammar_mask([])},
            bad_words={3: [[i] for i in range(VOCAB)]},
        )
        output = self.run(logits, batch)
        assert set(output.errors) == {1, 2, 3}
        assert all(message.startswith("no token is allowed") for message in output.errors.values())
        assert output.token_ids[0] == self.tokens(logits[:1], batch_of([plain]))[0]
