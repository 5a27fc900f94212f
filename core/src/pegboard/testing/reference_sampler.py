"""Sampling written to be obviously right: one row at a time, one definition after the other, in float64.

The yardstick of sampler tests. It shares no code with any sampler, and counts tokens in ``token_ids`` itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pegboard.contracts.sampler import SamplingBatch
from pegboard.wire import SamplingParams


def reference_distribution(logits: Any, batch: SamplingBatch, row: int) -> Any:
    """[V] probabilities of each token of ``row``, whose ``logits`` are [V]: 1 for the choice of a greedy row. None where the row
    must fail: a NaN among its logits, or no token left."""
    if np.isnan(logits[: batch.vocab_limit]).any():
        return None
    x = reference_logits(logits, batch, row)
    if not np.isfinite(x.max()):
        return None
    if batch.temperature[row] <= SamplingParams.GREEDY_TEMPERATURE:
        return np.where(np.arange(len(x)) == int(np.argmax(x)), 1.0, 0.0)
    x = _processed(x / float(batch.temperature[row]), batch, row, invariant=True)
    return _filtered(x, batch, row)


def reference_logits(logits: Any, batch: SamplingBatch, row: int) -> Any:
    """[V] float64: ``logits`` [V] of ``row`` after bias, processors, penalties and whatever forbids."""
    x = np.array(logits, np.float64)
    ids, values = batch.logit_bias.get(row, ((), ()))
    for token, value in zip(ids, values, strict=True):
        if token < batch.vocab_limit:
            x[token] += value
    x = _processed(x, batch, row, invariant=False)
    known = batch.token_ids[batch.slots[row], : batch.num_tokens[row]].tolist()
    output = known[batch.prompt_lens[row] :]
    _penalise(x, batch, row, known, output)
    for token in range(len(x)):
        if token >= batch.vocab_limit or _forbidden(token, batch, row, output):
            x[token] = -np.inf
    return x


def _penalise(x: Any, batch: SamplingBatch, row: int, known: list[int], output: list[int]) -> None:
    repetition = float(batch.repetition_penalty[row])
    for token in set(known):
        if token < len(x):
            x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in set(output):
        if token < len(x):
            x[token] -= float(batch.presence_penalty[row])
            x[token] -= float(batch.frequency_penalty[row]) * output.count(token)


def _forbidden(token: int, batch: SamplingBatch, row: int, output: list[int]) -> bool:
    if row in batch.allowed_token_ids and token not in batch.allowed_token_ids[row]:
        return True
    if row in batch.grammar_masks:
        words = batch.grammar_masks[row]
        if token // 32 >= len(words) or not (int(words[token // 32]) >> (token % 32)) & 1:
            return True
    for word in batch.bad_words.get(row, ()):
        before = list(word[:-1])
        if token == word[-1] and len(before) <= len(output) and output[len(output) - len(before) :] == before:
            return True
    return bool(len(output) < batch.min_tokens[row] and token in batch.stop_token_ids[row])


def _processed(x: Any, batch: SamplingBatch, row: int, *, invariant: bool) -> Any:
    import torch

    slot = int(batch.slots[row])
    for processor in batch.processors:
        if processor.argmax_invariant is invariant and slot in processor.concerns([slot]):
            given = torch.from_numpy(x[None].astype(np.float32))
            x = processor.apply(given, [slot])[0].numpy().astype(np.float64)
    return x


def _filtered(x: Any, batch: SamplingBatch, row: int) -> Any:
    """Softmax, then min-p, top-k, and top-p on what those left; equal logits by id."""
    p = np.exp(x - x.max())
    p[p < float(batch.min_p[row])] = 0.0
    order = sorted(range(len(p)), key=lambda token: (-x[token], token))
    if batch.top_k[row] > 0:
        p[order[int(batch.top_k[row]) :]] = 0.0
    p /= p.sum()
    reached = 0.0
    for token in order if batch.top_p[row] < 1.0 else ():
        before, reached = reached, reached + p[token]
        if before >= float(batch.top_p[row]):
            p[token] = 0.0
    return p / p.sum()


def assert_distribution(drawn: Any, expected: Any) -> None:
    """Chi-square of ids ``drawn`` [D] against probabilities ``expected`` [V]: ids with at least 5 expected draws, the others
    pooled, at six standard deviations of the statistic."""
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
