"""From a plan and the resident batch to the tensors of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pegboard.contracts.attention import CommonAttentionMetadata
from pegboard.wire import SchedulerOutput
from pegboard_plugins.worker.forks import logits_rows
from pegboard_plugins.worker.input_batch import InputBatch


class StepColumn:
    """A persistent host buffer and its device copy. On a CPU they are one; elsewhere the host side is pinned."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        on_host = device.type == "cpu"
        self._host = torch.zeros(size, dtype=dtype, pin_memory=not on_host)
        self._device = self._host if on_host else torch.zeros(size, dtype=dtype, device=device)
        self.host: np.ndarray = self._host.numpy()

    def send(self, count: int) -> torch.Tensor:
        """The first ``count`` entries on the device, as they are in ``host`` now."""
        if self._device is not self._host:
            self._device[:count].copy_(self._host[:count], non_blocking=True)
        return self._device[:count]


@dataclass(slots=True)
class StepInputs:
    """One step. B rows in the plan's order, T tokens, N rows that sample, M of them from logits of their own (all but forks)."""

    input_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64."""
    attention: tuple[CommonAttentionMetadata, ...]
    """The step as each KV-cache group sees it: they differ in blocks and slots only."""
    prompt_lens: torch.Tensor | None
    """[T] int64, for models that need it."""
    sample_rows: np.ndarray
    """[N] rows of the plan that sample."""
    sample_slots: np.ndarray
    sample_lengths: np.ndarray
    """[N] int32: tokens that each of them has before it samples."""
    sample_index: torch.Tensor | None
    """[M] the last token in the step of those with logits of their own; None if that is every token in order."""
    logits_index: torch.Tensor | None
    """[N] in 0 … M - 1: whose logits each takes; None without forks, when it is its own."""


class StepBuilder:
    """Makes ``StepInputs`` in buffers that live as long as the worker; each step overwrites the last one's."""

    def __init__(self, batch: InputBatch, max_tokens: int, device: torch.device, with_prompt_lens: bool = False) -> None:
        self._batch, self._device = batch, device
        names = ("input_ids", "positions", "prompt_lens")
        self._columns = {name: StepColumn(max_tokens, torch.int64, device) for name in names[: 2 + with_prompt_lens]}
        self._slot_mappings = [StepColumn(max_tokens, torch.int64, device) for _ in batch.block_tables]
        self._with_prompt_lens = with_prompt_lens
        self._sent: Any = None if device.type == "cpu" else torch.cuda.Event()

    def build(self, plan: SchedulerOutput) -> StepInputs:
        """Rows without tokens are left out of everything but what is sampled. Raises ``ValueError`` for a plan that does not fit
        what the batch holds, or that has draft tokens."""
        if plan.spec_slots:
            raise ValueError("the plan has draft tokens, which this worker does not verify; switch speculative decoding off")
        slots = np.array(plan.slots, np.int64)
        counts = np.array(plan.num_scheduled_tokens, np.int32)
        computed = np.array(plan.num_computed_tokens, np.int32)
        lengths = computed + counts
        self._batch.check(slots, lengths)
        rows = np.flatnonzero(np.array(plan.num_to_sample, np.int32))
        sample_slots, sample_lengths = slots[rows], lengths[rows]
        last, logits_index = self._logits(plan, counts, rows)
        if logits_index is not None:
            computing = counts > 0
            slots, counts, computed, lengths = slots[computing], counts[computing], computed[computing], lengths[computing]
        starts = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        if self._sent is not None:
            self._sent.synchronize()  # the last step's copies may still read the host buffers
        total = self._fill(slots, counts, computed, starts)
        sent = {name: column.send(total) for name, column in self._columns.items()}
        inputs = StepInputs(
            sent["input_ids"],
            sent["positions"],
            self._attention(slots, starts, lengths, total),
            sent.get("prompt_lens"),
            sample_rows=rows,
            sample_slots=sample_slots,
            sample_lengths=sample_lengths,
            sample_index=None if len(last) == total else self._send(last),
            logits_index=None if logits_index is None else self._send(logits_index),
        )
        if self._sent is not None:
            self._sent.record()
        return inputs

    def _logits(self, plan: SchedulerOutput, counts: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """What ``sample_index`` and ``logits_index`` hold, for the ``rows`` of the plan that sample; ``counts`` [B] tokens."""
        ends = np.cumsum(counts)
        origins = logits_rows(plan, self._batch)
        if origins is None:
            return ends[rows] - 1, None
        own = rows[counts[rows] > 0]
        return ends[own] - 1, np.searchsorted(own, origins[rows])

    def _send(self, index: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(index).to(self._device)

    def _fill(self, slots: np.ndarray, counts: np.ndarray, computed: np.ndarray, starts: np.ndarray) -> int:
        """Write ids, positions and cache places of every token. Returns how many there are."""
        total = int(starts[-1])
        hosts = {name: column.host[:total] for name, column in self._columns.items()}
        if total == len(slots):  # one token per row, the usual decode step
            token_slots = slots
            hosts["positions"][:] = computed
        else:
            token_slots = np.repeat(slots, counts)
            np.add(np.arange(total), np.repeat(computed - starts[:-1], counts), out=hosts["positions"])
        hosts["input_ids"][:] = self._batch.token_ids[token_slots, hosts["positions"]]
        for table, column in zip(self._batch.block_tables, self._slot_mappings, strict=True):
            table.slot_mapping(token_slots, hosts["positions"], column.host[:total])
        if self._with_prompt_lens:
            hosts["prompt_lens"][:] = self._batch.prompt_lens[token_slots]
        return total

    def _attention(
        self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, total: int
    ) -> tuple[CommonAttentionMetadata, ...]:
        longest = int(lengths.max())
        return tuple(
            CommonAttentionMetadata(
                query_start_loc=starts,
                seq_lens=lengths,
                block_table=torch.from_numpy(np.ascontiguousarray(table.blocks[slots, : table.width(longest)])).to(self._device),
                slot_mapping=slot_mapping.send(total),
                block_size=table.block_size,
                num_rows=len(slots),
                num_tokens=total,
            )
            for table, slot_mapping in zip(self._batch.block_tables, self._slot_mappings, strict=True)
        )
