"""Draws: what random rows ask for."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from pegboard.contracts.sampler import SamplingBatch


@dataclass(slots=True)
class Draws:
    """R random rows as columns [R]. A token's weight is exp((x - highest x) / temperature), which is 1 for the highest logit."""

    at: np.ndarray
    """Row of the logits."""
    temperature: np.ndarray
    """float64, 1 where the logits have been divided by it already."""
    min_p: np.ndarray
    """float64: the least weight that is kept."""
    k: np.ndarray
    """int64: how many tokens are kept; the vocabulary's size where top-k is off."""
    top_p: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray

    @classmethod
    def of(cls, batch: SamplingBatch, rows: np.ndarray, at: np.ndarray, scaled: np.ndarray, size: int) -> Draws:
        """Of batch rows ``rows`` [R], whose logits are in rows ``at``; ``scaled`` [R]: divided by the temperature."""
        k = batch.top_k[rows].astype(np.int64)
        return cls(
            at,
            np.where(scaled, 1.0, batch.temperature[rows].astype(np.float64)),
            batch.min_p[rows].astype(np.float64),
            np.where((k > 0) & (k < size), k, size),
            batch.top_p[rows].astype(np.float64),
            batch.seeds[rows],
            batch.positions[rows],
        )

    def take(self, which: np.ndarray) -> Draws:
        """Those of ``which``, indices."""
        return Draws(*(getattr(self, field.name)[which] for field in fields(self)))
