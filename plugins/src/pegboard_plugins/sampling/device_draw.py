"""Draws from rows on an accelerator: what is as wide as the vocabulary stays there, all rows at once."""

from __future__ import annotations

import numpy as np
import torch

from pegboard_plugins.sampling.draws import Draws
from pegboard_plugins.sampling.race import ATTEMPTS, LANES, Times

_ROWS_AT_ONCE = 64
"""Rows are worked on in portions of this size, which bounds the scratch memory."""


def draw_on_device(x: torch.Tensor, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """[R] ids and [R] float32 highest logits; an id means nothing where that is not finite. ``x`` [M, V] float32 is only read."""
    count = len(draws.at)
    portions = [np.arange(begin, min(begin + _ROWS_AT_ONCE, count)) for begin in range(0, count, _ROWS_AT_ONCE)]
    ids, top = (np.concatenate(parts) for parts in zip(*(_draw(x, draws.take(which)) for which in portions), strict=True))
    return ids, top


def _draw(x: torch.Tensor, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    size, rows = x.shape[1], x[torch.from_numpy(draws.at).to(x.device)]
    top = rows.amax(dim=1, keepdim=True)
    weights, nucleus = _weigh(rows, top, draws)
    ids = np.zeros(len(rows), np.int64)
    left = np.arange(len(rows))
    for attempt in range(ATTEMPTS + 1):
        at = torch.from_numpy(left).to(x.device)
        racing = weights[at] if attempt < ATTEMPTS or nucleus is None else weights[at] * nucleus[at]
        ids[left] = _race(racing, Times.of(draws.seeds[left], draws.positions[left], size, attempt))
        if nucleus is None:
            break
        inside = nucleus[at, torch.from_numpy(ids[left]).to(x.device)].cpu().numpy()
        left = left[~inside]
        if not left.size:
            break
    return ids, top[:, 0].cpu().numpy()


def _race(weights: torch.Tensor, times: Times) -> np.ndarray:
    """[R] winning ids of ``weights`` [R, V]: both heats are short, and run on the host."""
    rows, size = weights.shape
    lanes = torch.nn.functional.pad(weights, (0, -size % LANES)).view(rows, -1, LANES)
    winners = np.argmax(lanes.sum(1).double().cpu().numpy() / times.lanes, axis=1)
    members = lanes[torch.arange(rows, device=weights.device), :, torch.from_numpy(winners).to(weights.device)]
    return winners + LANES * np.argmax(members.double().cpu().numpy() / times.members, axis=1)


def _weigh(rows: torch.Tensor, top: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[R, V] weights, 0 for what min-p or top-k cut off; and [R, V] bool, what is in the nucleus, or None where top-p is off."""
    size = rows.shape[1]

    def column(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(values).to(rows.device, dtype)[:, None]

    weights = ((rows - top) * column(1.0 / draws.temperature, torch.float32)).exp_()
    if (draws.min_p > 0).any():
        weights *= weights >= column(draws.min_p, torch.float32)
    cut = np.flatnonzero((draws.k < size) | (draws.top_p < 1.0))
    if not cut.size:
        return weights, None
    at = torch.from_numpy(cut).to(rows.device)
    # + 0.0 turns -0.0 into 0.0: a sort by bits would tell them apart. Stable: equal values by id
    order = (rows[at] + 0.0).sort(dim=1, descending=True, stable=True).indices
    ranks = torch.arange(size, device=rows.device)
    falling = weights[at].gather(1, order) * (ranks < column(draws.k[cut], torch.int64))
    weights[at] = torch.zeros_like(falling).scatter_(1, order, falling)
    if not (draws.top_p < 1.0).any():
        return weights, None
    ends, top_p = falling.double().cumsum(1), column(draws.top_p[cut], torch.float64)
    inside = (ends - falling < ends[:, -1:] * top_p) | (top_p >= 1.0)
    inside[:, 0] = True
    nucleus = torch.ones_like(weights, dtype=torch.bool)
    nucleus[at] = torch.zeros_like(inside).scatter_(1, order, inside)
    return weights, nucleus
