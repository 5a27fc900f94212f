"""What the parts of the sampler's conformance kit share."""

from __future__ import annotations

from typing import Any

import numpy as np

from pegboard.contracts.logits_processor import BatchDelta, LogitsProcessor
from pegboard.contracts.sampler import Sampler, SamplerOutput, SamplingBatch
from pegboard.testing.reference_sampler import assert_distribution, reference_distribution
from pegboard.testing.sampling_batches import VOCAB, batch_of
from pegboard.wire import SamplingParams

DRAWS = 4000
"""Draws per comparison with a distribution."""

GREEDY = SamplingParams(temperature=0.0)


def flat(rows: int = 1, **peaks: float) -> Any:
    """[rows, VOCAB] float32 zeros with ``t<id>=value`` in every row."""
    logits = np.zeros((rows, VOCAB), np.float32)
    for name, value in peaks.items():
        logits[:, int(name.removeprefix("t"))] = value
    return logits


class Recorder(LogitsProcessor):
    """Adds ``change`` (id to amount) to the rows it concerns itself with, and notes what it was given."""

    def __init__(
        self, change: dict[int, float], *, invariant: bool = False, only: set[int] | None = None, in_place: bool = True
    ) -> None:
        self.argmax_invariant, self.change, self.only, self.in_place = invariant, change, only, in_place
        self.given: dict[int, Any] = {}

    def update_state(self, delta: BatchDelta | None) -> None: ...

    def concerns(self, rows: Any) -> Any:
        return [row for row in rows if self.only is None or row in self.only]

    def apply(self, logits: Any, rows: Any) -> Any:
        assert len(logits) == len(rows)
        self.given.update((row, logits[i].clone().numpy()) for i, row in enumerate(rows))
        result = logits if self.in_place else logits.clone()
        for token, amount in self.change.items():
            result[:, token] += amount
        return result


class SamplerTests:
    """Base of every part."""

    def make(self) -> Sampler:
        """A fresh sampler."""
        raise NotImplementedError("a subclass gives the sampler under test")

    def run(self, logits: Any, batch: SamplingBatch) -> SamplerOutput:
        import torch

        return self.make().sample(torch.from_numpy(np.array(logits, np.float32)), batch)

    def tokens(self, logits: Any, batch: SamplingBatch) -> list[int]:
        """Choices of a batch in which no row fails."""
        output = self.run(logits, batch)
        assert not output.errors
        chosen: list[int] = output.token_ids.tolist()
        return chosen

    def check_frequencies(self, logits: Any, params: SamplingParams, **context: Any) -> None:
        """Draws from ``logits`` [V] follow the reference; ``context`` is that of one row, as ``batch_of`` takes it."""
        one: Any = {name: [value] for name, value in context.items()}
        expected = reference_distribution(logits, batch_of([params], **one), 0)
        many: Any = {name: [value] * DRAWS for name, value in context.items()}
        drawn = self.run(np.repeat(logits[None], DRAWS, axis=0), batch_of([params] * DRAWS, seeds=range(DRAWS), **many))
        assert not drawn.errors
        assert_distribution(drawn.token_ids, expected)
