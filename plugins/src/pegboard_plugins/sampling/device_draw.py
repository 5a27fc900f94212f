"""Draws from rows on an accelerator: what is as wide as the vocabulary stays there, all rows at once."""

from __future__ import annotations

import numpy as np
import torch

from pegboard_plugins.sampling.draws import Draws
from pegboard_plugins.sampling.lanes import LANES, draw_ids, draw_lanes, lane_ids

_ROWS_AT_ONCE = 64
"""Rows are worked on in portions of this size, which bounds the scratch memory."""


def draw_on_device(x: torch.Tensor, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """[R] ids and [R] float32 highest logits; where these are not finite there is no id, -1. ``x`` [M, V] float32 is read."""
    count = len(draws.at)
    portions = [np.arange(begin, min(begin + _ROWS_AT_ONCE, count)) for begin in range(0, count, _ROWS_AT_ONCE)]
    ids, top = (np.concatenate(parts) for parts in zip(*(_draw(x, draws, which) for which in portions), strict=True))
    return np.where(np.isfinite(top), ids, -1), top


def _draw(x: torch.Tensor, draws: Draws, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    size = x.shape[1]
    rows = x[torch.from_numpy(draws.at[which]).to(x.device)]
    top = rows.amax(dim=1, keepdim=True)
    weights = _kept_weights(rows, top, draws, which)
    padded = torch.nn.functional.pad(weights, (0, -size % LANES))
    sums = padded.view(len(which), -1, LANES).sum(1).double().cpu().numpy()
    seeds, positions = draws.seeds[which], draws.positions[which]
    ids = lane_ids(draw_lanes(sums, seeds, positions), size)
    members = padded.gather(1, torch.from_numpy(ids).to(x.device)).double().cpu().numpy()
    return draw_ids(members, seeds, positions, ids), top[:, 0].cpu().numpy()


def _kept_weights(rows: torch.Tensor, top: torch.Tensor, draws: Draws, which: np.ndarray) -> torch.Tensor:
    """[R, V] weights of ``rows`` [R, V], the draws ``which`` [R], 0 for what min-p, top-k or top-p cut off."""
    size = rows.shape[1]

    def column(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(values).to(rows.device, dtype)[:, None]

    weights = ((rows - top) * column(1.0 / draws.temperature[which], torch.float32)).exp_()
    min_p = draws.min_p[which]
    if (min_p > 0).any():
        weights *= weights >= column(min_p, torch.float32)
    cut = np.flatnonzero((draws.k[which] < size) | (draws.top_p[which] < 1.0))
    if cut.size:
        at = torch.from_numpy(cut).to(rows.device)
        k, top_p = column(draws.k[which][cut], torch.int64), column(draws.top_p[which][cut], torch.float64)
        weights[at] = _first(rows[at], weights[at], k, top_p)
    return weights


def _first(rows: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """``weights`` [R, V] with zeros for what is not among the first ``k`` [R, 1], or not in their nucleus of ``top_p`` [R, 1]."""
    # + 0.0 turns -0.0 into 0.0: a sort by bits would tell them apart. Stable: equal values by id
    order = (rows + 0.0).sort(dim=1, descending=True, stable=True).indices
    ranks = torch.arange(rows.shape[1], device=rows.device)
    falling = weights.gather(1, order) * (ranks < k)
    ends = falling.double().cumsum(1)
    inside = (ends - falling < ends[:, -1:] * top_p) | (top_p >= 1.0)
    inside[:, 0] = True
    return torch.zeros_like(weights).scatter_(1, order, falling * inside)
