"""Logit bias: what a request adds to the logits of some ids."""

from __future__ import annotations

import numpy as np

from pegboard.contracts.sampler import SamplingBatch
from pegboard_plugins.sampling.working_rows import WorkingRows


def add_bias(work: WorkingRows, batch: SamplingBatch) -> None:
    """In place."""
    if batch.logit_bias:
        ids, values = zip(*batch.logit_bias.values(), strict=True)
        cells, bias = work.cells(batch.logit_bias, list(ids), np.concatenate(values))
        work.x.view(-1).index_add_(0, cells, bias)
