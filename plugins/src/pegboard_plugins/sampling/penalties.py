"""What a request's own tokens do to its logits: repetition, presence and frequency penalties, and min_tokens.

Repetition (Keskar et al. 2019, "CTRL", section 4.1) looks at prompt and output; presence and frequency (as the OpenAI API
defines them) look at the output alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pegboard.contracts.sampler import SamplingBatch


def mask_stop_tokens(logits: torch.Tensor, rows: np.ndarray, batch: SamplingBatch) -> None:
    """Forbid the stop ids of those rows that have not reached ``min_tokens``. ``logits[i]`` belongs to batch row ``rows[i]``."""
    size = logits.shape[1]
    flat = [
        i * size + token
        for i, row in enumerate(rows.tolist())
        if batch.positions[row] < batch.min_tokens[row]
        for token in batch.stop_token_ids[row]
        if 0 <= token < size
    ]
    if flat:
        logits.view(-1)[torch.tensor(flat, device=logits.device)] = float("-inf")


def has_penalties(batch: SamplingBatch) -> np.ndarray:
    """[N] bool: rows with any penalty."""
    return (batch.repetition_penalty != 1.0) | (batch.presence_penalty != 0.0) | (batch.frequency_penalty != 0.0)


def apply_penalties(logits: torch.Tensor, rows: np.ndarray, batch: SamplingBatch) -> None:
    """Change float32 ``logits`` in place; ``logits[i]`` belongs to batch row ``rows[i]``."""
    concerned = [(i, row) for i, row in enumerate(rows.tolist()) if batch.repetition_penalty[row] != 1.0]
    if concerned:
        _repetition(logits, concerned, batch)
    concerned = [
        (i, row)
        for i, row in enumerate(rows.tolist())
        if batch.presence_penalty[row] != 0.0 or batch.frequency_penalty[row] != 0.0
    ]
    if concerned:
        _presence_and_frequency(logits, concerned, batch)


def _flat_ids(concerned: Sequence[tuple[int, int]], batch: SamplingBatch, size: int, output_only: bool) -> np.ndarray:
    """Positions in the flattened logits of every known token of the rows; padding and ids without a logit are left out."""
    parts = []
    for i, row in concerned:
        begin = int(batch.prompt_lens[row]) if output_only else 0
        tokens = batch.token_ids[row, begin : batch.num_tokens[row]].astype(np.int64)
        parts.append(i * size + tokens[(tokens >= 0) & (tokens < size)])
    return np.concatenate(parts)


def _repetition(logits: torch.Tensor, concerned: Sequence[tuple[int, int]], batch: SamplingBatch) -> None:
    size = logits.shape[1]
    # an id that occurs twice is written twice with the same value, so duplicates need no care
    flat = torch.from_numpy(_flat_ids(concerned, batch, size, output_only=False)).to(logits.device)
    factors = torch.ones(len(logits), dtype=logits.dtype)
    for i, row in concerned:
        factors[i] = float(batch.repetition_penalty[row])
    factor = factors.to(logits.device)[flat // size]
    values = logits.view(-1)[flat]
    logits.view(-1)[flat] = torch.where(values > 0, values / factor, values * factor)


def _presence_and_frequency(logits: torch.Tensor, concerned: Sequence[tuple[int, int]], batch: SamplingBatch) -> None:
    size = logits.shape[1]
    flat, counts = np.unique(_flat_ids(concerned, batch, size, output_only=True), return_counts=True)
    presence, frequency = np.zeros(len(logits), np.float32), np.zeros(len(logits), np.float32)
    for i, row in concerned:
        presence[i], frequency[i] = batch.presence_penalty[row], batch.frequency_penalty[row]
    change = presence[flat // size] + frequency[flat // size] * counts.astype(np.float32)
    index = torch.from_numpy(flat).to(logits.device)
    logits.view(-1)[index] -= torch.from_numpy(change).to(logits.device)
