"""Batches and logits for tests of samplers: one ``SamplingBatch`` row per ``SamplingParams``, as a worker would make it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.contracts.sampler import SamplingBatch, TokenCounts
from pegboard.wire import SamplingParams

if TYPE_CHECKING:
    from pegboard.contracts.logits_processor import LogitsProcessor

VOCAB = 300
PADDING = 7
"""Fills ``token_ids`` behind the known tokens, and must have no effect."""


def batch_of(
    params: Sequence[SamplingParams],
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    outputs: Sequence[Sequence[int]] | None = None,
    stop_token_ids: Sequence[Sequence[int]] | None = None,
    seeds: Sequence[int] | None = None,
    bad_words: Mapping[int, Sequence[Sequence[int]]] | None = None,
    grammar_masks: Mapping[int, Any] | None = None,
    processors: Sequence[LogitsProcessor] = (),
    slots: Sequence[int] | None = None,
    vocab_limit: int = VOCAB,
) -> SamplingBatch:
    """Prompts default to [1], outputs to none, seeds to those of ``params``, slots to the row numbers. ``bad_words`` and
    ``grammar_masks`` are by row; ``logit_bias`` and ``allowed_token_ids`` come from ``params``."""
    n = len(params)
    prompts, outputs = prompts or [[1]] * n, outputs or [[]] * n
    where = list(range(n)) if slots is None else list(slots)
    known = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    tokens = np.full((max(where, default=0) + 1, max(map(len, known), default=1)), PADDING, np.int32)
    for slot, ids in zip(where, known, strict=True):
        tokens[slot, : len(ids)] = ids

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
        seeds=np.array(seeds or [(p.seed or 0) % 2**64 for p in params], np.uint64),
        positions=np.array([len(o) for o in outputs], np.int32),
        num_logprobs=np.array([-1 if p.logprobs is None else p.logprobs for p in params], np.int32),
        min_tokens=column("min_tokens", np.int32),
        stop_token_ids=[list(ids) for ids in stop_token_ids or [[]] * n],
        slots=np.array(where, np.int64),
        token_ids=tokens,
        num_tokens=np.array([len(ids) for ids in known], np.int32),
        prompt_lens=np.array([len(p) for p in prompts], np.int32),
        vocab_limit=vocab_limit,
        token_counts={row: counts_of(prompts[row], outputs[row]) for row in range(n) if params[row].has_penalties},
        logit_bias={row: _bias(p.logit_bias) for row, p in enumerate(params) if p.logit_bias},
        allowed_token_ids={row: np.array(p.allowed_token_ids) for row, p in enumerate(params) if p.allowed_token_ids is not None},
        bad_words=dict(bad_words or {}),
        grammar_masks=dict(grammar_masks or {}),
        processors=processors,
    )


def counts_of(prompt: Sequence[int], output: Sequence[int]) -> TokenCounts:
    """From scratch."""
    ids = sorted({*prompt, *output})
    occurrences = [list(output).count(token) for token in ids]
    return TokenCounts(np.array(ids, np.int64), np.array(occurrences, np.int32))


def grammar_mask(allowed: Sequence[int], vocab: int = VOCAB) -> Any:
    """[ceil(vocab / 32)] little-endian uint32 with the bits of ``allowed`` set."""
    words = np.zeros(-(-vocab // 32), np.dtype("<u4"))
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Any:
    """[rows, vocab] float32, with many equal values (multiples of 1/8), as bfloat16 logits have."""
    rng = np.random.default_rng(seed)
    return (np.round(rng.normal(0, 2, (rows, vocab)) * 8) / 8).astype(np.float32)


def _bias(bias: Mapping[int, float]) -> tuple[Any, Any]:
    return np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
