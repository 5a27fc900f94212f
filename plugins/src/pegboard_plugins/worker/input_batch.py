"""InputBatch: what the worker knows of every running request. Changed by the deltas of plans and by the worker's own samples."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pegboard.contracts.sampler import SamplingBatch
from pegboard.wire import PLACEHOLDER_TOKEN, NewRequestData, SamplingParams, SchedulerOutput
from pegboard_plugins.sampling.random import request_seed
from pegboard_plugins.worker.block_table import BlockTable
from pegboard_plugins.worker.sparse_columns import SparseColumns, by_row

_SAMPLING_COLUMNS: Mapping[str, type] = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "min_tokens": np.int32,
}
"""Columns that hold a field of ``SamplingParams``."""


class InputBatch:
    """Rows are slots: a request keeps its row while it runs. All columns are numpy arrays on the host.

    Invariant: ``token_ids[slot, :num_tokens[slot]]`` are the tokens known so far, prompt and output. Sampled tokens are
    written here by the worker at once, so a plan that is made before they are known (``PLACEHOLDER_TOKEN``) needs no
    second message: steps are applied in order.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        vocab_limit: int,
        seed: int | None,
        num_groups: int = 1,
    ) -> None:
        """``seed`` is the engine's, from which requests without one get theirs; None counts as 0. ``num_groups``: see
        ``use_groups``."""
        self.num_slots, self.max_model_len, self.seed = num_slots, max_model_len, seed or 0
        self.vocab_limit = vocab_limit
        # pages are committed when first written: a long context costs nothing until it is used.
        # One more column than the context is long: the last token's sample has a place too.
        self.token_ids = np.zeros((num_slots, max_model_len + 1), np.int32)
        self.num_tokens = np.zeros(num_slots, np.int32)
        self.prompt_lens = np.zeros(num_slots, np.int32)
        self.occupied = np.zeros(num_slots, np.bool_)
        self.block_size = block_size
        self.block_tables: tuple[BlockTable, ...] = ()
        self.use_groups(num_groups)
        self.columns: dict[str, np.ndarray] = {name: np.zeros(num_slots, dtype) for name, dtype in _SAMPLING_COLUMNS.items()}
        self.seeds = np.zeros(num_slots, np.uint64)
        self.num_logprobs = np.full(num_slots, -1, np.int32)
        self.stop_token_ids: list[list[int]] = [[] for _ in range(num_slots)]
        self.sparse = SparseColumns()

    def use_groups(self, num_groups: int) -> None:
        """One block table for each KV-cache group; no request may be here."""
        max_blocks = -(-(self.max_model_len + 1) // self.block_size)
        self.block_tables = tuple(BlockTable(self.num_slots, max_blocks, self.block_size) for _ in range(num_groups))

    @property
    def num_requests(self) -> int:
        return int(self.occupied.sum())

    # -- deltas ------------------------------------------------------------------------------------------------------

    def leave(self, plan: SchedulerOutput) -> None:
        """First part of a plan: finished and preempted requests give up their rows."""
        for slot in plan.finished_slots + plan.preempted_slots:
            self.occupied[slot] = False
            self.num_tokens[slot] = 0
            self.sparse.leave(slot)

    def enter(self, plan: SchedulerOutput) -> None:
        """Third and fourth part: new requests, then what is appended to block tables and tokens."""
        for request in plan.new_requests:
            self._add(request)
        for slot, block_ids in zip(plan.block_slots, plan.block_ids, strict=True):
            for table, ids in zip(self.block_tables, block_ids, strict=True):
                table.append(slot, ids)
        for slot, tokens in zip(plan.token_slots, plan.token_ids, strict=True):
            for token in tokens:
                if token != PLACEHOLDER_TOKEN:  # a placeholder stands for a token that the worker has put here itself
                    self.token_ids[slot, self.num_tokens[slot]] = token
                    self.num_tokens[slot] += 1

    def _add(self, request: NewRequestData) -> None:
        slot, count = request.slot, len(request.token_ids)
        if self.occupied[slot]:
            raise ValueError(f"request {request.request_id!r} enters slot {slot}, which another one holds")
        if count > self.max_model_len:
            raise ValueError(f"request {request.request_id!r} has {count} tokens, the context holds {self.max_model_len}")
        self.occupied[slot] = True
        self.token_ids[slot, :count] = request.token_ids
        self.num_tokens[slot], self.prompt_lens[slot] = count, request.prompt_len
        for table, ids in zip(self.block_tables, request.block_ids, strict=True):
            table.replace(slot, ids)
        self.stop_token_ids[slot] = list(request.stop_token_ids)
        self._set_sampling(slot, request.request_id, request.sampling)
        self.sparse.enter(request)

    def _set_sampling(self, slot: int, request_id: str, params: SamplingParams) -> None:
        for name, column in self.columns.items():
            column[slot] = getattr(params, name)
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        seed = request_seed(self.seed, request_id) if params.seed is None else params.seed
        self.seeds[slot] = seed & 0xFFFFFFFFFFFFFFFF  # negative seeds are taken modulo 2**64

    # -- steps -------------------------------------------------------------------------------------------------------

    def check(self, slots: np.ndarray, ends: np.ndarray) -> None:
        """Raise ``ValueError`` unless ``slots`` are held by requests with at least ``ends`` known tokens."""
        bad = ~self.occupied[slots] | (ends > self.num_tokens[slots])
        if bad.any():
            row = int(np.argmax(bad))
            slot = int(slots[row])
            state = f"{self.num_tokens[slot]} known tokens" if self.occupied[slot] else "no request"
            raise ValueError(f"the plan computes {int(ends[row])} tokens of slot {slot}, which has {state}")

    def sampling_batch(self, slots: np.ndarray, lengths: np.ndarray) -> SamplingBatch:
        """Columns of the rows that sample, the request in ``slots[i]`` having ``lengths[i]`` tokens."""
        columns = {name: column[slots] for name, column in self.columns.items()}
        prompt_lens = self.prompt_lens[slots]
        return SamplingBatch(
            **columns,
            slots=slots,
            seeds=self.seeds[slots],
            positions=lengths - prompt_lens,
            num_logprobs=self.num_logprobs[slots],
            stop_token_ids=[self.stop_token_ids[slot] for slot in slots.tolist()],
            token_ids=self.token_ids,
            num_tokens=lengths,
            prompt_lens=prompt_lens,
            vocab_limit=self.vocab_limit,
            token_counts=self.sparse.token_counts(slots, lengths, self.token_ids),
            logit_bias=by_row(self.sparse.logit_bias, slots),
            allowed_token_ids=by_row(self.sparse.allowed_token_ids, slots),
            bad_words=by_row(self.sparse.bad_words, slots),
        )

    def append_sampled(self, slots: np.ndarray, lengths: np.ndarray, token_ids: np.ndarray) -> None:
        """Put each row's token behind its first ``lengths[i]``. A failed row (-1) gets 0, for a step already on its way."""
        self.token_ids[slots, lengths] = np.maximum(token_ids, 0)
        self.num_tokens[slots] = lengths + 1
