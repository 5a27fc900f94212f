"""The first tokens of a row in canonical order: by falling value, equal values by rising id.

The order is a function of the row alone, so neither the number of candidates that were asked for nor the batch changes which
token a draw falls on. Equal values are common: bfloat16 has eight significant bits.
"""

from __future__ import annotations

import numpy as np
import torch

_GROUPS = 1024
"""Groups of logits whose maxima bound the k-th highest logit from below."""


def top_candidates(logits: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first ``count`` of each row in canonical order: values [R, count] float32 and ids [R, count] int64, on the host.

    ``logits`` [R, V] float32 without NaN.
    """
    count = min(count, logits.shape[1])
    if logits.device.type == "cpu":
        return _on_host(logits.numpy(), count)
    return _on_device(logits, count)


def least_of_top(row: np.ndarray, k: int) -> np.float32:
    """A value that at least ``k`` of ``row`` [V] reach, and not many more (unless they are equal)."""
    size = len(row)
    if 4 * k > _GROUPS or size < 2 * _GROUPS:
        return np.partition(row, size - k)[size - k]  # the k-th highest itself
    # k groups with a maximum of at least m hold k logits of at least m. Groups are strided, which makes this one maximum
    # of long vectors after another; whatever is left beyond the last full stride can only add to those that reach m.
    maxima = np.maximum.reduce(row[: size - size % _GROUPS].reshape(-1, _GROUPS), axis=0)
    return np.partition(maxima, _GROUPS - k)[_GROUPS - k]


def canonical(values: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values and ids sorted along the last axis by falling value, then rising id, through one sort of unique integer keys."""
    bits = (values + np.float32(0.0)).view(np.int32).astype(np.int64)  # + 0.0 turns -0.0 into 0.0
    keys = (-_flip(bits) << 32) | ids
    keys.sort(axis=-1)
    ordered = _flip(-(keys >> 32)).astype(np.int32).view(np.float32)
    return ordered, keys & 0xFFFFFFFF


def _flip(bits: np.ndarray) -> np.ndarray:
    """Bit patterns of float32 to integers in the same order, and back."""
    return np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _on_host(rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    values = np.empty((len(rows), count), np.float32)
    ids = np.empty((len(rows), count), np.int64)
    for i, row in enumerate(rows):
        found = np.flatnonzero(row >= least_of_top(row, count))
        ordered, where = canonical(row[found], found)
        values[i], ids[i] = ordered[:count], where[:count]
    return values, ids


def _on_device(logits: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    best, where = logits.topk(min(count + 1, logits.shape[1]), dim=-1)
    found = best.cpu().numpy()
    values, ids = canonical(found[:, :count], where[:, :count].cpu().numpy())
    if found.shape[1] > count:
        # equal values straddle the boundary and topk took some of them: look at all of them
        for i in np.flatnonzero(found[:, count] == found[:, count - 1]).tolist():
            every = (logits[i] >= best[i, count]).nonzero()[:, 0]
            ordered, tokens = canonical(logits[i, every].cpu().numpy(), every.cpu().numpy())
            values[i], ids[i] = ordered[:count], tokens[:count]
    return values, ids
