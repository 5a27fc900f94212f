"""What must not be chosen: ids that are not allowed, or not by a grammar, bad words, stop ids before ``min_tokens``.

It comes after everything that changes logits, so that nothing can undo it.
"""

from __future__ import annotations

import numpy as np
import torch

from pegboard.contracts.sampler import SamplingBatch
from pegboard_plugins.sampling.bad_words import BadWords
from pegboard_plugins.sampling.working_rows import WorkingRows

_FORBIDDEN = float("-inf")


def waits_for_min_tokens(batch: SamplingBatch) -> np.ndarray:
    """[N] bool: rows whose stop ids are still forbidden."""
    return batch.positions < batch.min_tokens


def constrained_rows(batch: SamplingBatch) -> np.ndarray:
    """[N] bool: rows to which something is forbidden."""
    found = waits_for_min_tokens(batch)
    for sparse in (batch.allowed_token_ids, batch.grammar_masks, batch.bad_words):
        if sparse:
            found[list(sparse)] = True
    return found


def forbid(work: WorkingRows, batch: SamplingBatch) -> None:
    """In place. A logit becomes the smaller of itself and -inf, which leaves a NaN where it was: its row must fail."""
    if batch.allowed_token_ids:
        _keep_only(work, batch.allowed_token_ids)
    if batch.grammar_masks:
        (_mask_on_host if work.on_host else _mask_on_device)(work, batch.grammar_masks)
    waiting = np.flatnonzero(waits_for_min_tokens(batch)).tolist()
    forbidden = [(row, np.array(batch.stop_token_ids[row], np.int64)) for row in waiting]
    for row, words in batch.bad_words.items():
        output = batch.token_ids[batch.slots[row], batch.prompt_lens[row] : batch.num_tokens[row]]
        forbidden.append((row, BadWords.of(words).forbidden(output)))
    if forbidden:
        rows, ids = zip(*forbidden, strict=True)
        (cells,) = work.cells(rows, list(ids))
        flat = work.x.view(-1)
        flat.index_copy_(0, cells, flat.index_select(0, cells).clamp_(max=_FORBIDDEN))


def no_token_is_allowed(row: int, batch: SamplingBatch) -> str:
    """The message for a row whose logits are all -inf."""
    reasons = []
    if row in batch.allowed_token_ids:
        reasons.append(f"allowed_token_ids ({len(batch.allowed_token_ids[row])} ids)")
    if row in batch.grammar_masks:
        reasons.append("the grammar of structured_outputs")
    if row in batch.bad_words:
        reasons.append("bad_words")
    if batch.positions[row] < batch.min_tokens[row]:
        stops = ", ".join(map(str, batch.stop_token_ids[row]))
        reasons.append(f"min_tokens={batch.min_tokens[row]} (after {batch.positions[row]} tokens, stop ids {stops})")
    if batch.processors:
        reasons.append("logits processors")
    if not reasons:
        return "no token is allowed: every logit of the model is -inf; check the weights"
    return f"no token is allowed: in force are {'; '.join(reasons)}, which leave none together; relax one of them"


def _keep_only(work: WorkingRows, allowed: dict[int, np.ndarray]) -> None:
    (cells,) = work.cells(allowed, list(allowed.values()))
    flat = work.x.view(-1)
    kept = flat.index_select(0, cells)
    for row in allowed:
        work.logits[work.place[row]].clamp_(max=_FORBIDDEN)
    flat.index_copy_(0, cells, kept)


def _mask_on_host(work: WorkingRows, masks: dict[int, np.ndarray]) -> None:
    """The smaller of a logit and a bound that is -inf or inf: no branch per id, which the processor would mispredict."""
    logits = work.logits.numpy()
    for row, words in masks.items():
        bits = np.unpackbits(words.astype("<u4", copy=False).view(np.uint8), count=work.size, bitorder="little")  # 0 beyond
        bounds = bits.astype(np.float32)
        bounds -= np.float32(0.5)
        bounds *= np.float32(np.inf)
        target = logits[work.place[row]]
        np.minimum(target, bounds, out=target)


def _mask_on_device(work: WorkingRows, masks: dict[int, np.ndarray]) -> None:
    words = np.zeros((len(masks), -(-work.size // 32)), np.int32)
    for i, row_words in enumerate(masks.values()):
        found = row_words[: words.shape[1]]
        words[i, : len(found)] = found.astype(np.uint32).view(np.int32)
    shifts = torch.arange(32, dtype=torch.int32, device=work.x.device)
    allowed = ((work.index(words)[:, :, None] >> shifts) & 1).flatten(1)[:, : work.size]
    rows = work.index(work.place[list(masks)])
    logits = work.logits
    bounds = (allowed.float() - 0.5) * float("inf")
    logits[rows] = torch.minimum(logits[rows], bounds)
