"""Log probabilities of chosen tokens and their best alternatives: log-softmax of the raw logits in float32."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from pegboard.contracts.sampler import SamplingBatch
from pegboard.wire import Logprobs
from pegboard_plugins.sampling.candidates import top_candidates


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
        return dict(zip(rows.tolist(), logprobs_of(raw, token_ids[rows], counts), strict=True))


@np.errstate(over="ignore")  # logits as far apart as float32 reaches: a log probability of -inf
def logprobs_of(raw: torch.Tensor, token_ids: np.ndarray, counts: Sequence[int]) -> list[Logprobs]:
    """Of one token per row of ``raw`` [R, V] float32 without NaN: ``token_ids`` [R] int64, with ``counts[i]`` alternatives each.
    Ids from V on, which no row can choose, have the log probability of minus infinity and the last rank."""
    measure = _measure_on_host if raw.device.type == "cpu" else _measure_on_device
    normaliser, own, ranks = measure(raw, token_ids)
    if not any(counts):
        return [Logprobs([int(token)], [own[i]], ranks[i]) for i, token in enumerate(token_ids)]
    best, best_ids = top_candidates(raw, max(counts))
    best = best - normaliser[:, None]
    return [
        _logprobs(int(token), own[i], ranks[i], best_ids[i, :count].tolist(), best[i, :count].tolist())
        for i, (token, count) in enumerate(zip(token_ids, counts, strict=True))
    ]


def _measure_on_host(raw: torch.Tensor, token_ids: np.ndarray) -> tuple[np.ndarray, list[float], list[int]]:
    """[R] log of the sum of exponentials, and of each row's token its log probability and rank. A row at a time is read from
    the core's cache, and numpy's loops are several times faster than torch's."""
    logits = raw.numpy()
    normaliser, own, ranks = np.empty(len(logits), np.float32), [], []
    scratch = np.empty(logits.shape[1], np.float32)
    for i, (row, token) in enumerate(zip(logits, token_ids.tolist(), strict=True)):
        top = row.max()
        np.subtract(row, top, out=scratch)
        normaliser[i] = top + np.log(np.exp(scratch, out=scratch).sum())
        value = row[token] if token < len(row) else np.float32(-np.inf)
        own.append(float(value - normaliser[i]))
        ranks.append(int(np.count_nonzero(row > value)) + 1)
    return normaliser, own, ranks


def _measure_on_device(raw: torch.Tensor, token_ids: np.ndarray) -> tuple[np.ndarray, list[float], list[int]]:
    size = raw.shape[1]
    normaliser = torch.logsumexp(raw, dim=-1, keepdim=True)
    chosen = torch.from_numpy(token_ids).to(raw.device)[:, None]
    value = raw.gather(1, chosen.clamp(max=size - 1)).masked_fill_(chosen >= size, float("-inf"))
    ranks: list[int] = ((raw > value).sum(dim=-1) + 1).tolist()
    return normaliser[:, 0].cpu().numpy(), (value - normaliser)[:, 0].tolist(), ranks


def _logprobs(token: int, own: float, rank: int, ids: list[int], values: list[float]) -> Logprobs:
    """The chosen token first, then the best ones without it."""
    others = [(i, v) for i, v in zip(ids, values, strict=True) if i != token]
    return Logprobs([token, *(i for i, _ in others)], [own, *(v for _, v in others)], rank)
