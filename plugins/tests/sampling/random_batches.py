"""Batches with every option in every mixture."""

from __future__ import annotations

from typing import Any

import numpy as np

from pegboard.contracts.logits_processor import BatchDelta, LogitsProcessor
from pegboard.contracts.sampler import SamplingBatch
from pegboard.testing.sampling_batches import batch_of, grammar_mask
from pegboard.wire import SamplingParams


class Shift(LogitsProcessor):
    """Adds a pattern to the logits of every third slot."""

    def update_state(self, delta: BatchDelta | None) -> None: ...

    def concerns(self, rows: Any) -> Any:
        return [row for row in rows if row % 3 == 0]

    def apply(self, logits: Any, rows: Any) -> Any:
        import torch

        return logits + torch.cos(torch.arange(logits.shape[1]).float())


class Widen(LogitsProcessor):
    """Takes a row's other logits further away from its highest."""

    argmax_invariant = True

    def update_state(self, delta: BatchDelta | None) -> None: ...

    def concerns(self, rows: Any) -> Any:
        return [row for row in rows if row % 4 == 1]

    def apply(self, logits: Any, rows: Any) -> Any:
        top = logits.max(dim=1, keepdim=True).values
        logits.copy_(top - 1.25 * (top - logits))
        return logits


def random_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    """Each option is there or not; values reach from mild to extreme."""

    def maybe(chance: float, value: Any, otherwise: Any) -> Any:
        return value if rng.random() < chance else otherwise

    return SamplingParams(
        temperature=float(rng.choice([0.0, 1e-5, 0.05, 0.5, 0.9, 1.0, 1.7, 4.0])),
        top_k=int(maybe(0.5, rng.choice([1, 2, 7, 40, vocab // 2, vocab, 10**6]), 0)),
        top_p=float(maybe(0.5, rng.choice([1e-6, 0.1, 0.5, 0.9, 0.97, 0.9999]), 1.0)),
        min_p=float(maybe(0.3, rng.choice([1e-4, 0.02, 0.3, 1.0]), 0.0)),
        repetition_penalty=float(maybe(0.4, rng.choice([0.5, 1.1, 2.0]), 1.0)),
        presence_penalty=float(maybe(0.4, rng.choice([-2.0, 0.3, 2.0]), 0.0)),
        frequency_penalty=float(maybe(0.4, rng.choice([-0.7, 0.3, 2.0]), 0.0)),
        seed=int(rng.integers(-(2**63), 2**63)),
        logit_bias=maybe(0.3, {int(t): float(rng.uniform(-20, 20)) for t in rng.integers(0, vocab + 20, 6)}, None),
        allowed_token_ids=maybe(0.3, tuple(rng.integers(0, vocab + 20, int(rng.choice([1, 5, vocab]))).tolist()), None),
        min_tokens=int(maybe(0.3, rng.integers(0, 10), 0)),
        logprobs=maybe(0.3, int(rng.integers(0, 6)), None),
    )


def random_batch(rng: np.random.Generator, rows: int, vocab: int) -> tuple[np.ndarray, SamplingBatch]:
    """Logits [rows, vocab + padding] and what is asked of them. Few rows must fail."""
    logits = (rng.normal(0, rng.choice([0.3, 2.0, 6.0]), (rows, vocab + int(rng.integers(0, 40))))).astype(np.float32)
    if rng.random() < 0.3:
        logits = np.round(logits)  # many equal ones
    bad = rng.integers(0, 12)
    if bad < rows:
        logits[bad, rng.integers(0, vocab)] = rng.choice([np.nan, -np.inf])
    outputs = [rng.integers(0, vocab, int(rng.choice([0, 1, 4, 60]))).tolist() for _ in range(rows)]
    words: dict[int, list[list[int]]] = {}
    for row in np.flatnonzero(rng.random(rows) < 0.3).tolist():
        ends = [[*outputs[row][-n:], int(logits[row, :vocab].argmax())] for n in (1, 2, 3)]
        words[row] = [*ends, *rng.integers(0, vocab, (5, 2)).tolist(), [int(rng.integers(0, vocab))]]
    masks = {
        row: grammar_mask(np.flatnonzero(rng.random(vocab) < rng.choice([0.02, 0.5, 0.99])).tolist(), vocab)
        for row in np.flatnonzero(rng.random(rows) < 0.25).tolist()
    }
    return logits, batch_of(
        [random_params(rng, vocab) for _ in range(rows)],
        prompts=[rng.integers(0, vocab, int(rng.integers(1, 30))).tolist() for _ in range(rows)],
        outputs=outputs,
        stop_token_ids=[rng.integers(0, vocab, 2).tolist() for _ in range(rows)],
        bad_words=words,
        grammar_masks=masks,
        processors=[Shift(), Widen()] if rng.random() < 0.5 else [],
        slots=rng.permutation(rows + 5)[:rows].tolist(),
        vocab_limit=vocab,
    )
