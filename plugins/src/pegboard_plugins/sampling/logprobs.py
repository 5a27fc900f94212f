"""Log probabilities of chosen tokens and their best alternatives: log-softmax of the raw logits in float32."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from pegboard.contracts.sampler import SamplingBatch
from pegboard.wire import Logprobs
from pegboard_plugins.sampling.top_k_top_p import top_candidates


class RawLogprobs:
    """Remembers what the rows that want log probabilities looked like before anything changed them.

    ``rows`` [R] batch rows; ``logits`` [R, V] their raw values, copied here.
    """

    def __init__(self, logits: torch.Tensor, rows: np.ndarray, batch: SamplingBatch) -> None:
        self.rows = rows
        self._counts = batch.num_logprobs[rows].tolist()
        self._raw = logits[torch.from_numpy(rows).to(logits.device)].float()  # indexing copies

    def chosen(self, token_ids: np.ndarray, failed: Collection[int]) -> dict[int, Logprobs]:
        """Log probabilities by batch row, ``token_ids`` [N] being the choices; rows in ``failed`` are left out."""
        keep = [i for i, row in enumerate(self.rows.tolist()) if row not in failed]
        if not keep:
            return {}
        rows, counts = self.rows[keep], [self._counts[i] for i in keep]
        raw = self._raw if len(keep) == len(self.rows) else self._raw[torch.tensor(keep, device=self._raw.device)]
        normaliser = torch.logsumexp(raw, dim=-1, keepdim=True)
        own_raw = raw.gather(1, torch.from_numpy(token_ids[rows]).to(raw.device)[:, None])
        own = (own_raw - normaliser)[:, 0].tolist()
        ranks = ((raw > own_raw).sum(dim=-1) + 1).tolist()
        best, best_ids = top_candidates(raw, max(1, *counts))
        best = best - normaliser.cpu().numpy()
        return {
            row: _logprobs(int(token_ids[row]), own[i], ranks[i], best_ids[i, :count].tolist(), best[i, :count].tolist())
            for i, (row, count) in enumerate(zip(rows.tolist(), counts, strict=True))
        }


def _logprobs(token: int, own: float, rank: int, ids: list[int], values: list[float]) -> Logprobs:
    """The chosen token first, then the best ones without it."""
    others = [(i, v) for i, v in zip(ids, values, strict=True) if i != token]
    return Logprobs([token, *(i for i, _ in others)], [own, *(v for _, v in others)], rank)
