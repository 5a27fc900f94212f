"""The standard sampler. The order of operations is that of ``pegboard.contracts.sampler.Sampler``.

Each row pays for what it asks for: rows that only want their highest logit are read once and never written, whatever their
neighbours want; operations that concern few ids of few rows touch those alone; and what is as wide as the vocabulary is done on
the device that holds the logits.
"""

from __future__ import annotations

import numpy as np
import torch

from pegboard.config import EngineConfig
from pegboard.contracts.sampler import Sampler, SamplerOutput, SamplingBatch
from pegboard.wire import SamplingParams
from pegboard_plugins.sampling.bias import add_bias
from pegboard_plugins.sampling.constraints import constrained_rows, forbid, no_token_is_allowed
from pegboard_plugins.sampling.device_draw import draw_on_device
from pegboard_plugins.sampling.draws import Draws
from pegboard_plugins.sampling.host_draw import draw_on_host
from pegboard_plugins.sampling.logprobs import RawLogprobs
from pegboard_plugins.sampling.penalties import apply_penalties, has_penalties
from pegboard_plugins.sampling.processors import Concern, concerns
from pegboard_plugins.sampling.working_rows import WorkingRows


class DefaultSampler(Sampler):
    """Stateless; works on any device and with logits of any floating type."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SamplerOutput:
        logits = logits.detach()
        size = min(batch.vocab_limit, logits.shape[1])
        output = SamplerOutput(np.full(len(logits), -1, np.int64))
        wanted = np.flatnonzero(batch.num_logprobs >= 0)
        raw = RawLogprobs(logits[:, :size], wanted, batch) if wanted.size else None
        _Step(logits, size, batch, output).run()
        if raw is not None:
            output.logprobs = raw.chosen(output.token_ids, set(output.errors))
        return output


class _Step:
    """One batch on its way to tokens."""

    def __init__(self, logits: torch.Tensor, size: int, batch: SamplingBatch, output: SamplerOutput) -> None:
        self.batch, self.output = batch, output
        self.greedy = batch.temperature <= SamplingParams.GREEDY_TEMPERATURE
        everyone = np.arange(len(logits))
        self.processors = concerns(batch, invariant=False, rows=everyone)
        self.penalised, self.constrained = has_penalties(batch), constrained_rows(batch)
        self.changed = self.penalised | self.constrained
        self.changed[list(batch.logit_bias)] = True
        for concern in self.processors:
            self.changed[concern.rows] = True
        # what has to be written to or drawn from; the others are only read
        self.busy = self.changed | ~self.greedy
        self.reading = WorkingRows.of(logits, size, np.flatnonzero(~self.busy), written=False)
        self.work = WorkingRows.of(logits, size, np.flatnonzero(self.busy), written=True)

    def run(self) -> None:
        if len(self.reading.rows):
            self._take_highest(self.reading, self.reading.rows)
        if self.changed.any():
            self._change()
        changed_greedy = np.flatnonzero(self.greedy & self.busy)
        if changed_greedy.size:
            self._take_highest(self.work, changed_greedy)
        random = np.flatnonzero(~self.greedy)
        if random.size:
            self._draw(random)

    def _change(self) -> None:
        """Steps 2 to 5: everything between the raw logits and the choice."""
        work, batch = self.work, self.batch
        add_bias(work, batch)
        for concern in self.processors:
            concern.apply(work, batch.slots)
        if self.penalised.any():
            apply_penalties(work, batch, np.flatnonzero(self.penalised))
        if self.constrained.any():
            forbid(work, batch)

    def _take_highest(self, work: WorkingRows, rows: np.ndarray) -> None:
        """Choose the first highest id of each of ``rows``."""
        maxima, ids = work.maxima(rows)
        self._choose(rows, ids, maxima)

    def _choose(self, rows: np.ndarray, ids: np.ndarray, maxima: np.ndarray) -> None:
        """``ids`` [R] for ``rows`` [R], unless the highest logit is not finite: that row is an error."""
        self.output.token_ids[rows] = ids
        for i in np.flatnonzero(~np.isfinite(maxima)).tolist():
            self._fail(int(rows[i]), float(maxima[i]))

    def _fail(self, row: int, maximum: float) -> None:
        self.output.token_ids[row] = -1
        if maximum == float("-inf"):
            self.output.errors[row] = no_token_is_allowed(row, self.batch)
        else:
            self.output.errors[row] = f"the logits are not finite ({maximum}); try dtype float32, or check the weights"

    def _draw(self, rows: np.ndarray) -> None:
        """Steps 7 to 9, for the ``rows`` that are not greedy."""
        work, batch = self.work, self.batch
        scaled = np.zeros(len(self.greedy), np.bool_)
        late = concerns(batch, invariant=True, rows=rows)
        if late:
            self._scale(late, scaled)
        draws = Draws.of(batch, rows, work.place[rows], scaled[rows], work.size)
        drawn = draw_on_host(work.logits.numpy(), draws) if work.on_host else draw_on_device(work.logits, draws)
        self._choose(rows, *drawn)

    def _scale(self, late: list[Concern], scaled: np.ndarray) -> None:
        """Divide the rows that processors want after the temperature by it, mark them in ``scaled`` [N], and apply these.

        The other rows are scaled where they are weighed."""
        for concern in late:
            scaled[concern.rows] = True
        rows = np.flatnonzero(scaled)
        places = self.work.index(self.work.place[rows])
        temperature = self.work.index(self.batch.temperature[rows].astype(np.float32))
        self.work.x[places] = self.work.x[places] / temperature[:, None]
        for concern in late:
            concern.apply(self.work, self.batch.slots)
