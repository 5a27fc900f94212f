"""Penalties: what the tokens that a request knows do to its logits.

Repetition (Keskar et al. 2019, "CTRL", section 4.1) looks at prompt and output; presence and frequency (as the OpenAI API
defines them) look at the output alone.
"""

from __future__ import annotations

import numpy as np
import torch

from pegboard.contracts.sampler import SamplingBatch
from pegboard_plugins.sampling.working_rows import WorkingRows


def has_penalties(batch: SamplingBatch) -> np.ndarray:
    """[N] bool: rows with any penalty."""
    return (batch.repetition_penalty != 1.0) | (batch.presence_penalty != 0.0) | (batch.frequency_penalty != 0.0)


def apply_penalties(work: WorkingRows, batch: SamplingBatch, rows: np.ndarray) -> None:
    """In place, on batch ``rows``: one gather and one scatter of the tokens that they know."""
    known = [batch.token_counts[row] for row in rows.tolist()]
    lengths = [len(counts.ids) for counts in known]
    if not sum(lengths):
        return
    occurrences = np.concatenate([counts.output_counts for counts in known]).astype(np.float32)
    repetition, presence, frequency = (
        np.repeat(column[rows], lengths) for column in (batch.repetition_penalty, batch.presence_penalty, batch.frequency_penalty)
    )
    change = frequency * occurrences + presence * (occurrences > 0)
    cells, factor, less = work.cells(rows.tolist(), [counts.ids for counts in known], repetition, change)
    logits = work.x.view(-1)
    values = logits.index_select(0, cells)
    values = torch.where(values > 0, values / factor, values * factor) - less
    logits.scatter_(0, cells, values)
