"""Candidates of a row in falling order, and how many of them top-k and top-p keep.

The order is canonical: by value, equal values by id. It is a function of the row alone, so neither the number of
candidates that were asked for nor the batch changes which token a draw falls on. Equal values are common: bfloat16 has
eight significant bits.
"""

from __future__ import annotations

import numpy as np
import torch

CANDIDATES = (256, 4096)
"""Tried one after the other for rows that only have top-p; rows whose nucleus is still larger are sorted whole."""


def top_candidates(logits: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first ``count`` of each row in canonical order: values [R, count] float32 and ids [R, count] int64, on the host.

    ``logits`` [R, V] float32 without NaN.
    """
    count = min(count, logits.shape[1])
    if logits.device.type == "cpu":
        return _by_partition(logits.numpy(), count)
    return _by_topk(logits, count)


def nucleus(weights: np.ndarray, k: np.ndarray, total: np.ndarray, top_p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``weights`` [R, C] float64 of canonical candidates with zeros for those cut off, and [R] whether the cut lies among them.

    The first ``k`` weights count. What they leave (or, where top-k is off, the row's whole weight ``total``) is the mass of
    which the nucleus is the shortest prefix that reaches the share ``top_p``; it has at least one token.
    """
    width = weights.shape[1]
    weights = np.where(np.arange(width) < k[:, None], weights, 0.0)
    ends = np.cumsum(weights, axis=1)
    with_k = k <= width
    mass = np.where(with_k, ends[:, -1], total) * top_p
    kept = ends - weights < mass[:, None]
    kept[:, 0] = True
    return np.where(kept, weights, 0.0), with_k | (ends[:, -1] >= mass)


def _by_partition(rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """numpy's partition and integer sort are vectorised: several times faster than ``torch.topk`` on a CPU."""
    size = rows.shape[1]
    values = np.empty((len(rows), count), np.float32)
    ids = np.empty((len(rows), count), np.int64)
    for i, row in enumerate(rows):
        if count < size:
            threshold = np.partition(row, size - count)[size - count]
            found = np.flatnonzero(row >= threshold)  # all of the equal ones at the boundary
            ordered, where = _canonical(row[found], found)
        else:
            ordered, where = _canonical(row, np.arange(size))
        values[i], ids[i] = ordered[:count], where[:count]
    return values, ids


def _by_topk(logits: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    best, where = logits.topk(min(count + 1, logits.shape[1]), dim=-1)
    found = best.cpu().numpy()
    values, ids = _canonical(found[:, :count], where[:, :count].cpu().numpy())
    if found.shape[1] > count:
        # equal values straddle the boundary and topk took some of them: look at all of them
        for i in np.flatnonzero(found[:, count] == found[:, count - 1]).tolist():
            every = (logits[i] >= best[i, count]).nonzero()[:, 0]
            ordered, tokens = _canonical(logits[i, every].cpu().numpy(), every.cpu().numpy())
            values[i], ids[i] = ordered[:count], tokens[:count]
    return values, ids


def _canonical(values: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values and ids sorted along the last axis by falling value, then rising id, through one sort of unique integer keys."""
    bits = (values + np.float32(0.0)).view(np.int32).astype(np.int64)  # + 0.0 turns -0.0 into 0.0
    keys = (-_flip(bits) << 32) | ids
    keys.sort(axis=-1)
    ordered = _flip(-(keys >> 32)).astype(np.int32).view(np.float32)
    return ordered, keys & 0xFFFFFFFF


def _flip(bits: np.ndarray) -> np.ndarray:
    """Bit patterns of float32 to integers in the same order, and back."""
    return np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
