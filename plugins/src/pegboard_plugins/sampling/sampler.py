"""The standard sampler: greedy, temperature, min-p, top-k, top-p, penalties, seeds, log probabilities.

The order is fixed:

1. raw log probabilities are noted;
2. stop ids of rows that have not reached ``min_tokens`` are forbidden;
3. penalties: repetition on prompt and output, presence and frequency on the output;
4. greedy rows take the first of the highest logits; the others are divided by their temperature;
5. min-p, then top-k, then top-p on what those left;
6. one uniform number per row, a function of (seed, output position), picks the token.
"""

from __future__ import annotations

import numpy as np
import torch

from pegboard.config import EngineConfig
from pegboard.contracts.sampler import Sampler, SamplerOutput, SamplingBatch
from pegboard.wire import SamplingParams
from pegboard_plugins.sampling.logprobs import RawLogprobs
from pegboard_plugins.sampling.penalties import apply_penalties, has_penalties, mask_stop_tokens
from pegboard_plugins.sampling.random import block_sums, draw_all, pick, uniforms
from pegboard_plugins.sampling.top_k_top_p import FIRST_CANDIDATES, nucleus, top_candidates

_ROWS_AT_ONCE = 32
"""Random rows are worked on in portions of this size, which bounds the float32 scratch memory."""


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
            if drawn.size < len(rows):
                x = _select(x, drawn)
            output.token_ids[rows[drawn]] = self._draw(x, rows[drawn], maxima[drawn], batch)

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

    @staticmethod
    def _draw(x: torch.Tensor, rows: np.ndarray, maxima: np.ndarray, batch: SamplingBatch) -> np.ndarray:
        """One token id per row of ``x`` [R, V], which is overwritten."""
        temperature = batch.temperature[rows].astype(np.float32)
        x.div_(torch.from_numpy(temperature)[:, None].to(x.device))
        top = (maxima / temperature).astype(np.float32)
        min_p = batch.min_p[rows]
        if (min_p > 0).any():
            with np.errstate(divide="ignore"):
                floor = top + np.log(min_p).astype(np.float32)  # log(0) is -inf: no floor
            x.masked_fill_(x < torch.from_numpy(floor)[:, None].to(x.device), float("-inf"))

        uniform = uniforms(batch.seeds[rows], batch.positions[rows])
        top_k, top_p = batch.top_k[rows], batch.top_p[rows]
        size = x.shape[1]
        filtered = ((top_k > 0) & (top_k < size)) | (top_p < 1.0)
        ids = np.empty(len(rows), np.int64)
        if not filtered.all():
            free = np.flatnonzero(~filtered)
            weights = (_select(x, free) - torch.from_numpy(top[free])[:, None].to(x.device)).exp_()
            ids[free] = draw_all(weights, uniform[free])
        if filtered.any():
            bound = np.flatnonzero(filtered)
            k = np.where((top_k > 0) & (top_k < size), top_k, size)[bound]
            ids[bound] = _draw_filtered(_select(x, bound), top[bound], k, top_p[bound], uniform[bound])
        return ids


def _draw_filtered(x: torch.Tensor, top: np.ndarray, k: np.ndarray, top_p: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Draw under top-k (``k`` is the vocabulary's size where it is off) and then top-p. All arrays have length R."""
    ids = np.empty(len(x), np.int64)
    size = x.shape[1]
    without_k = np.flatnonzero(k == size)
    total = np.zeros(len(x))
    if without_k.size:
        weights = (_select(x, without_k) - torch.from_numpy(top[without_k])[:, None].to(x.device)).exp_()
        total[without_k] = np.cumsum(block_sums(weights), axis=1)[:, -1]
    pending = np.arange(len(x))
    count = max(FIRST_CANDIDATES, int(k[k < size].max(initial=0)))
    while pending.size:
        values, found = top_candidates(_select(x, pending), count)
        weights, complete = nucleus(values, k[pending], top[pending], total[pending], top_p[pending])
        complete |= values.shape[1] == size
        # running sums, unlike numpy's pairwise sum, do not depend on how many zeros follow
        chosen = pick(weights, uniform[pending] * np.cumsum(weights, axis=1)[:, -1])
        ids[pending[complete]] = found[np.arange(len(pending)), chosen][complete]
        pending, count = pending[~complete], size
    return ids


def _select(x: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """The named rows of ``x``, as a copy."""
    return x[torch.from_numpy(rows).to(x.device)]


def _not_finite(maximum: float) -> str:
    if maximum == float("-inf"):
        return "no token is allowed: every logit is masked"
    return f"the model's logits are not finite ({maximum}); try dtype float32, or check the weights"
