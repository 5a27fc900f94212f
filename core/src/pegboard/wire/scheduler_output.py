"""The plan of one step, as the scheduler sends it to every worker.

Requests are named by *slot*: an integer in ``[0, max_num_seqs)`` that a request holds while it runs. The string id
crosses once, in ``NewRequestData``. Columns of the same length replace lists of objects; a column that concerns few
requests is sparse and has its own slot column.

A worker applies a plan in this order, which makes reuse of a slot within one plan well defined:

1. ``finished_slots`` and ``preempted_slots`` leave the resident batch;
2. ``swap_out``, ``swap_in`` and ``block_copies`` move KV blocks, in that order;
3. ``new_requests`` enter (a resumed request is sent as a new one: its block table *replaces* whatever was there);
4. ``block_slots``/``block_ids`` *append* to block tables, ``token_slots``/``token_ids`` append tokens that the worker lacks;
5. ``slots``/``num_scheduled_tokens``/``num_computed_tokens`` say what to compute.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pegboard.wire.sampling_params import SamplingParams

SCHEMA = 1
"""Version of the wire structs in this package; both ends of a queue must agree."""

PLACEHOLDER_TOKEN = -1
"""A token that is scheduled but not known yet: the worker fills it in from its own last sample."""

BlockIds = list[list[int]]
"""Block ids of one request, one list per KV-cache group."""


class NewRequestData(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Everything a worker needs to know of a request that enters its resident batch.

    ``token_ids`` holds the prompt and, after a preemption, the output so far; ``prompt_len`` says where output begins.
    ``num_computed_tokens`` tokens of it are already in the KV cache (prefix hits, or swapped in).
    """

    slot: int
    request_id: str
    token_ids: list[int]
    prompt_len: int
    sampling: SamplingParams
    stop_token_ids: list[int]
    block_ids: BlockIds
    num_computed_tokens: int = 0
    bad_word_ids: list[list[int]] = msgspec.field(default_factory=list)
    ext: dict[str, Any] = msgspec.field(default_factory=dict)


class SchedulerOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One step. ``slots``, ``num_scheduled_tokens``, ``num_computed_tokens`` and ``num_to_sample`` are aligned: batch order.

    A row samples when its chunk reaches the end of its known tokens, placeholders included; a row that does not reach
    it is an intermediate prefill chunk and samples nothing (``num_to_sample`` says which: 0 or 1 + accepted drafts at most).

    ``spec_slots``/``spec_token_ids``: draft tokens appended to the chunk of some rows, counted in their
    ``num_scheduled_tokens``; ``PLACEHOLDER_TOKEN`` where a draft was dropped but the shape is kept.
    ``fork_slots``/``fork_sources``: requests that share a prompt with the request in the source slot, which ends its prompt in
    this very plan. A forked row schedules 0 tokens, counts the whole prompt as computed, and samples 1 token of its own from
    the source row's logits. Its last, partly filled block is filled by a block copy in the next plan.
    ``grammar_slots``: rows whose logits are masked in the second half of the step (``sample_tokens``).
    """

    step_id: int
    slots: list[int] = msgspec.field(default_factory=list)
    num_scheduled_tokens: list[int] = msgspec.field(default_factory=list)
    num_computed_tokens: list[int] = msgspec.field(default_factory=list)
    num_to_sample: list[int] = msgspec.field(default_factory=list)
    new_requests: list[NewRequestData] = msgspec.field(default_factory=list)
    finished_slots: list[int] = msgspec.field(default_factory=list)
    preempted_slots: list[int] = msgspec.field(default_factory=list)
    block_slots: list[int] = msgspec.field(default_factory=list)
    block_ids: list[BlockIds] = msgspec.field(default_factory=list)
    token_slots: list[int] = msgspec.field(default_factory=list)
    token_ids: list[list[int]] = msgspec.field(default_factory=list)
    spec_slots: list[int] = msgspec.field(default_factory=list)
    spec_token_ids: list[list[int]] = msgspec.field(default_factory=list)
    fork_slots: list[int] = msgspec.field(default_factory=list)
    fork_sources: list[int] = msgspec.field(default_factory=list)
    grammar_slots: list[int] = msgspec.field(default_factory=list)
    block_copies: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """(source, destination) device blocks: copy on write. Their order doesn't matter: a block is written once at most, and not
    read as well."""
    swap_out: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """(device, host) blocks."""
    swap_in: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """(host, device) blocks."""
    connector_metadata: bytes | None = None
    ext: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens)

    @property
    def empty(self) -> bool:
        """Nothing to compute. State changes (finished slots, copies) may still have to reach the workers."""
        return not self.slots

    @property
    def has_state_changes(self) -> bool:
        return bool(self.finished_slots or self.preempted_slots or self.block_copies or self.swap_out or self.swap_in)


class GrammarOutput(msgspec.Struct, kw_only=True):
    """Token bitmasks of a step, sent with ``sample_tokens``: one row of ``ceil(vocab/32)`` little-endian uint32 per slot."""

    step_id: int
    slots: list[int]
    bitmask: bytes
