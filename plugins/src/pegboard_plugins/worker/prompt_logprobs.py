"""Log probabilities of prompt tokens, for the requests that want them."""

from __future__ import annotations

import numpy as np
import torch

from pegboard.contracts.model import Model
from pegboard.wire import Logprobs, SchedulerOutput
from pegboard_plugins.sampling.logprobs import logprobs_of
from pegboard_plugins.worker.input_batch import InputBatch

POSITIONS_AT_ONCE = 64
"""Logits are computed of so many positions at a time: those of a whole prompt would take more memory than all else."""


class PromptLogprobs:
    """Knows which resident requests want log probabilities of their prompt, and computes those that a step's chunks predict.

    The hidden state at position ``p`` predicts token ``p + 1``. Values are log-softmax of raw float32 logits over the ids
    below the vocabulary's limit. Other requests cost nothing, nor does a request whose prompt has been computed.
    """

    def __init__(self, batch: InputBatch) -> None:
        self._batch = batch
        self._counts: dict[int, int] = {}
        """Slot to the number of alternatives, until the end of its prompt."""

    def update(self, plan: SchedulerOutput) -> None:
        """Requests leave and enter, in the plan's order."""
        if self._counts:
            for slot in plan.finished_slots + plan.preempted_slots:
                self._counts.pop(slot, None)
        for request in plan.new_requests:
            if request.sampling.prompt_logprobs is not None:
                self._counts[request.slot] = request.sampling.prompt_logprobs

    def compute(
        self, plan: SchedulerOutput, hidden: torch.Tensor, model: Model
    ) -> tuple[dict[int, list[Logprobs]], dict[int, str]]:
        """By row of ``plan``, whose forward gave ``hidden`` [T, hidden_size]: one entry for each prompt token that its chunk
        predicts. And messages for rows whose logits are no numbers, instead."""
        found: dict[int, list[Logprobs]] = {}
        errors: dict[int, str] = {}
        if not self._counts:
            return found, errors
        wanted = self._take(plan)
        for begin in range(0, wanted.shape[1], POSITIONS_AT_ONCE):
            rows, places, tokens, counts = wanted[:, begin : begin + POSITIONS_AT_ONCE]
            raw = raw_logits(model, hidden[torch.from_numpy(places).to(hidden.device)], self._batch.vocab_limit)
            maxima = raw.amax(dim=1).cpu().numpy()
            bad = ~np.isfinite(maxima)
            for row, maximum in zip(rows[bad].tolist(), maxima[bad].tolist(), strict=True):
                errors[row] = (
                    f"the model's logits for the prompt are not finite ({maximum}); try dtype float32, or check the weights"
                )
            if bad.any():
                raw, rows, tokens, counts = raw[torch.from_numpy(~bad).to(raw.device)], rows[~bad], tokens[~bad], counts[~bad]
            for row, entry in zip(rows.tolist(), logprobs_of(raw, tokens, counts.tolist()), strict=True):
                found.setdefault(row, []).append(entry)
        return {row: entries for row, entries in found.items() if row not in errors}, errors

    def _take(self, plan: SchedulerOutput) -> np.ndarray:
        """[4, P] int64, a column for each position to look at, in the plan's order: its row, its place among the step's tokens,
        the token that it predicts, the number of alternatives. Forgets requests whose prompt ends here."""
        parts = [np.empty((4, 0), np.int64)]
        place = 0
        for row, (slot, begin, count) in enumerate(
            zip(plan.slots, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True)
        ):
            alternatives = self._counts.get(slot)
            if alternatives is not None:
                prompt_len = int(self._batch.prompt_lens[slot])
                end = min(begin + count, prompt_len - 1)
                if end > begin:
                    part = np.empty((4, end - begin), np.int64)
                    part[0], part[1] = row, np.arange(place, place + end - begin)
                    part[2], part[3] = self._batch.token_ids[slot, begin + 1 : end + 1], alternatives
                    parts.append(part)
                if begin + count >= prompt_len:
                    del self._counts[slot]
            place += count
        return np.concatenate(parts, axis=1)


def raw_logits(model: Model, hidden: torch.Tensor, vocab_limit: int) -> torch.Tensor:
    """[P, hidden_size] to [P, vocab_limit] float32."""
    return model.compute_logits(hidden)[:, :vocab_limit].float()
