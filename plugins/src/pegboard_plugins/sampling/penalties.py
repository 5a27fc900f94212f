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
    for i, row in enumerate(rows.tolist()):
        if batch.positions[row] < batch.min_tokens[row]:
            forbidden = [token for token in batch.stop_token_ids[row] if 0 <= token < logits.shape[1]]
            logits[i, forbidden] = float("-inf")


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


def _known_tokens(
    concerned: Sequence[tuple[int, int]], batch: SamplingBatch, size: int, output_only: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Row in the logits and id of every known token of the rows; padding and ids without a logit are left out."""
    indices, tokens = [], []
    for i, row in concerned:
        begin = int(batch.prompt_lens[row]) if output_only else 0
        known = batch.token_ids[batch.slots[row], begin : batch.num_tokens[row]].astype(np.int64)
        known = known[(known >= 0) & (known < size)]
        indices.append(np.full(len(known), i))
        tokens.append(known)
    return np.concatenate(indices), np.concatenate(tokens)


def _repetition(logits: torch.Tensor, concerned: Sequence[tuple[int, int]], batch: SamplingBatch) -> None:
    factors = np.ones(len(logits), np.float32)
    for i, row in concerned:
        factors[i] = batch.repetition_penalty[row]
    # an id that occurs twice is written twice with the same value, so duplicates need no care
    rows, tokens = _known_tokens(concerned, batch, logits.shape[1], output_only=False)
    index = torch.from_numpy(rows).to(logits.device), torch.from_numpy(tokens).to(logits.device)
    factor = torch.from_numpy(factors[rows]).to(logits.device)
    values = logits[index]
    logits[index] = torch.where(values > 0, values / factor, values * factor)


def _presence_and_frequency(logits: torch.Tensor, concerned: Sequence[tuple[int, int]], batch: SamplingBatch) -> None:
    size = logits.shape[1]
    presence, frequency = np.zeros(len(logits), np.float32), np.zeros(len(logits), np.float32)
    for i, row in concerned:
        presence[i], frequency[i] = batch.presence_penalty[row], batch.frequency_penalty[row]
    rows, tokens = _known_tokens(concerned, batch, size, output_only=True)
    flat, counts = np.unique(rows * size + tokens, return_counts=True)
    rows, tokens = np.divmod(flat, size)
    change = presence[rows] + frequency[rows] * counts.astype(np.float32)
    index = torch.from_numpy(rows).to(logits.device), torch.from_numpy(tokens).to(logits.device)
    logits[index] -= torch.from_numpy(change).to(logits.device)
