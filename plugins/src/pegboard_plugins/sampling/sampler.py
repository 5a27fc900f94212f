"""The standard sampler: greedy, temperature, min-p, top-k, top-p, penalties, seeds, log probabilities.

The order is fixed:

1. raw log probabilities are noted;
2. stop ids of rows that have not reached ``min_tokens`` are forbidden;
3. penalties: repetition on prompt and output, presence and frequency on the output;
4. greedy rows take the first of the highest logits; the others are divided by their temperature;
5. min-p, then top-k, then top-p on what those left;
6. what is left races, timed by numbers that are a function of (seed, output position, token id): see ``random``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pegboard.config import EngineConfig
from pegboard.contracts.sampler import Sampler, SamplerOutput, SamplingBatch
from pegboard.wire import SamplingParams
from pegboard_plugins.sampling.logprobs import RawLogprobs
from pegboard_plugins.sampling.penalties import apply_penalties, has_penalties, mask_stop_tokens
from pegboard_plugins.sampling.random import block_sums, draw_all, race
from pegboard_plugins.sampling.top_k_top_p import CANDIDATES, nucleus, top_candidates

_ROWS_AT_ONCE = 32
"""Random rows are worked on in portions of this size, which bounds the float32 scratch memory."""

_CANDIDATES_AT_ONCE = 1 << 16
"""Candidates of all rows together that are sorted and summed in one portion."""


class DefaultSampler(Sampler):
    """Stateless; works on any device. What is as wide as the vocabulary stays on the device, what is small goes to the host."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SamplerOutput:
        logits = logits[:, : batch.vocab_limit]
        output = SamplerOutput(np.full(len(logits), -1, np.int64))
        wanted = np.flatnonzero(batch.num_logprobs >= 0)
        raw = RawLogprobs(logits, wanted, batch) if wanted.size else None

        greedy = batch.temperature <= SamplingParams.GREEDY_TEMPERATURE
        changed = has_penalties(batch) | (batch.positions < batch.min_tokens)
        plain = greedy & ~changed
        if plain.all():  # nothing to change or to draw: no copy, no index
            self._take_highest(logits, np.arange(len(logits)), output)
        else:
            if plain.any():
                self._take_highest(_select(logits, np.flatnonzero(plain)), np.flatnonzero(plain), output)
            others = np.flatnonzero(~plain)
            for begin in range(0, len(others), _ROWS_AT_ONCE):
                self._choose(logits, others[begin : begin + _ROWS_AT_ONCE], greedy, changed, batch, output)
        if raw is not None:
            output.logprobs = raw.chosen(output.token_ids, set(output.errors))
        return output

    def _choose(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        greedy: np.ndarray,
        changed: np.ndarray,
        batch: SamplingBatch,
        output: SamplerOutput,
    ) -> None:
        """Rows that need more than their highest logit."""
        x = _select(logits, rows).float()
        if changed[rows].any():
            mask_stop_tokens(x, rows, batch)
            apply_penalties(x, rows, batch)
        maxima = self._take_highest(x, rows, output)
        drawn = np.flatnonzero(~greedy[rows] & np.isfinite(maxima))
        if drawn.size:
            x = _select(x, drawn)
            output.token_ids[rows[drawn]] = _Drawing.of(x, rows[drawn], maxima[drawn], batch).draw()

    @staticmethod
    def _take_highest(x: torch.Tensor, rows: np.ndarray, output: SamplerOutput) -> np.ndarray:
        """Put the first highest id of each row of ``x`` into ``output``; rows without a finite maximum become errors.

        Returns the maxima [R]. On a CPU numpy finds them about ten times faster than torch; both let a NaN win.
        """
        if x.device.type == "cpu":
            values = x.float().numpy()
            ids = values.argmax(axis=1)
            maxima = values[np.arange(len(values)), ids]
        else:
            best, where = x.max(dim=-1)
            maxima, ids = best.float().cpu().numpy(), where.cpu().numpy()
        output.token_ids[rows] = ids
        for i in np.flatnonzero(~np.isfinite(maxima)).tolist():
            row = int(rows[i])
            output.token_ids[row] = -1
            output.errors[row] = _not_finite(float(maxima[i]))
        return maxima


@dataclass(slots=True)
class _Drawing:
    """Random rows: ``x`` [R, V] scaled logits; everything else [R]. ``top`` is each row's highest; a weight is exp(x - top)."""

    x: torch.Tensor
    top: np.ndarray
    min_p: np.ndarray
    k: np.ndarray
    """The vocabulary's size where top-k is off."""
    top_p: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray

    @classmethod
    def of(cls, x: torch.Tensor, rows: np.ndarray, maxima: np.ndarray, batch: SamplingBatch) -> _Drawing:
        """Takes ``x`` over and scales it in place."""
        temperature = batch.temperature[rows].astype(np.float32)
        x.div_(torch.from_numpy(temperature)[:, None].to(x.device))
        top_k, size = batch.top_k[rows], x.shape[1]
        return cls(
            x,
            (maxima / temperature).astype(np.float32),
            batch.min_p[rows].astype(np.float32),
            np.where((top_k > 0) & (top_k < size), top_k, size),
            batch.top_p[rows],
            batch.seeds[rows],
            batch.positions[rows],
        )

    def draw(self) -> np.ndarray:
        """One id per row."""
        filtered = (self.k < self.x.shape[1]) | (self.top_p < 1.0)
        ids = np.empty(len(self.x), np.int64)
        free, bound = np.flatnonzero(~filtered), np.flatnonzero(filtered)
        if free.size:
            ids[free] = draw_all(self._weights(free), self.seeds[free], self.positions[free])
        if bound.size:
            self._draw_among_candidates(bound, ids)
        return ids

    def _draw_among_candidates(self, rows: np.ndarray, ids: np.ndarray) -> None:
        """Rows with top-k or top-p: into ``ids``."""
        size = self.x.shape[1]
        total = np.zeros(len(self.x))
        without_k = rows[self.k[rows] == size]
        if without_k.size:
            total[without_k] = np.cumsum(block_sums(self._weights(without_k)), axis=1)[:, -1]
        largest_k = int(self.k[self.k < size].max(initial=0))
        for count in (max(CANDIDATES[0], largest_k), max(CANDIDATES[1], largest_k), size):
            left = [self._try_candidates(part, count, total, ids) for part in _portions(rows, count)]
            rows = np.concatenate(left)
            if not rows.size:
                return

    def _try_candidates(self, rows: np.ndarray, count: int, total: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Draw those of ``rows`` whose cut lies among their first ``count`` candidates; return the others."""
        values, found = top_candidates(_select(self.x, rows), count)
        weights = np.exp(values.astype(np.float64) - self.top[rows].astype(np.float64)[:, None])
        weights[weights < self.min_p[rows, None]] = 0.0
        weights, complete = nucleus(weights, self.k[rows], total[rows], self.top_p[rows])
        complete |= values.shape[1] == self.x.shape[1]
        chosen = race(weights, self.seeds[rows], self.positions[rows], found)
        ids[rows[complete]] = found[np.arange(len(rows)), chosen][complete]
        return rows[~complete]

    def _weights(self, rows: np.ndarray) -> torch.Tensor:
        """[len(rows), V], zero below min-p."""
        device = self.x.device
        weights = (_select(self.x, rows) - torch.from_numpy(self.top[rows])[:, None].to(device)).exp_()
        min_p = self.min_p[rows]
        if (min_p > 0).any():
            weights.masked_fill_(weights < torch.from_numpy(min_p)[:, None].to(device), 0.0)
        return weights


def _portions(rows: np.ndarray, count: int) -> list[np.ndarray]:
    """Few rows at a time when there are many candidates, so that the work stays in a core's cache."""
    return np.array_split(rows, -(-len(rows) * count // _CANDIDATES_AT_ONCE))


def _select(x: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """The named rows of ``x`` in rising order: ``x`` itself when that is all of them, else a copy."""
    return x if len(rows) == len(x) else x[torch.from_numpy(rows).to(x.device)]


def _not_finite(maximum: float) -> str:
    if maximum == float("-inf"):
        return "no token is allowed: every logit is masked"
    return f"the model's logits are not finite ({maximum}); try dtype float32, or check the weights"
