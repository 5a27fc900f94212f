"""MirrorWorker: a worker's resident batch without a model. Replays plans and refuses what no worker could follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pegboard.contracts.kv_allocator import NULL_BLOCK
from pegboard.testing.windows import first_seen
from pegboard.wire import PLACEHOLDER_TOKEN, KVCacheConfig, NewRequestData, SamplingParams, SchedulerOutput

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(SchedulerOutput)


@dataclass(slots=True)
class MirrorRow:
    """One resident request. ``num_computed`` tokens of ``token_ids`` are in the KV cache after the last plan, but for those in
    the blocks of ``due_copies``: (source, destination) pairs that the next plan has to copy for it."""

    request_id: str
    token_ids: list[int]
    prompt_len: int
    block_ids: list[list[int]]
    num_computed: int
    stop_token_ids: list[int] = field(default_factory=list)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    ext: dict[str, Any] = field(default_factory=dict)
    due_copies: list[tuple[int, int]] = field(default_factory=list)


class MirrorWorker:
    """Applies each plan in the order that ``pegboard.wire.scheduler_output`` prescribes, after a round trip through msgpack.

    ``rows`` maps slots to what a worker must know by now; behind the window of a KV-cache group they have null blocks, whatever
    the plans said, for what is there may belong to others. ``keeps_samples`` False is a worker that does not see the samples:
    it learns tokens from plans alone. All complaints are ``AssertionError``.
    """

    def __init__(
        self,
        kv_config: KVCacheConfig,
        *,
        max_num_seqs: int = 1 << 30,
        max_num_batched_tokens: int = 1 << 30,
        keeps_samples: bool = True,
    ) -> None:
        self.kv_config = kv_config
        self.block_size = kv_config.block_size
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.keeps_samples = keeps_samples
        self.rows: dict[int, MirrorRow] = {}
        self.last_step = 0

    # -- applying a plan -----------------------------------------------------------------------------------------------

    def apply(self, plan: SchedulerOutput) -> SchedulerOutput:
        """Check and apply ``plan``; returns it as it came out of the wire."""
        received = _DECODER.decode(_ENCODER.encode(plan))
        assert received == plan, "the plan changes on its way through msgpack"
        assert received.step_id > self.last_step, f"step {received.step_id} after step {self.last_step}"
        self.last_step = received.step_id
        self._leave(received)
        for row in self.rows.values():
            row.block_ids = self._seen(row.block_ids, row.num_computed)
        self._move_blocks(received)
        for new in received.new_requests:
            self._enter(new, new.slot in received.fork_slots)
        self._append(received)
        self._check_rows(received)
        self._check_forks(received)
        return received

    def _leave(self, plan: SchedulerOutput) -> None:
        for slot in [*plan.finished_slots, *plan.preempted_slots]:
            assert slot in self.rows, f"slot {slot} leaves but is not in the batch"
            del self.rows[slot]

    def _move_blocks(self, plan: SchedulerOutput) -> None:
        device, host = self.kv_config.num_blocks, self.kv_config.num_host_blocks
        moves = (
            ("block_copies", plan.block_copies, device, device),
            ("swap_out", plan.swap_out, device, host + 1),
            ("swap_in", plan.swap_in, host + 1, device),
        )
        for name, pairs, sources, destinations in moves:
            for source, destination in pairs:
                assert 0 < source < sources, f"{name}: no block {source}"
                assert 0 < destination < destinations, f"{name}: no block {destination}"
            assert len({d for _, d in pairs}) == len(pairs), f"{name}: two blocks go to one place"
        chained = {s for s, _ in plan.block_copies} & {d for _, d in plan.block_copies}
        assert not chained, f"block_copies: what comes out depends on their order; blocks {chained} are copied from and to"
        for slot, row in self.rows.items():
            missing = set(row.due_copies) - set(plan.block_copies)
            assert not missing, f"slot {slot} was forked in the last plan, and this one does not make the copies {missing}"
            row.due_copies = []

    def _enter(self, new: NewRequestData, forked: bool) -> None:
        assert 0 <= new.slot < self.max_num_seqs, f"no slot {new.slot}"
        assert new.slot not in self.rows, f"slot {new.slot} is taken by {self.rows[new.slot].request_id!r}"
        assert new.request_id not in {row.request_id for row in self.rows.values()}, f"{new.request_id!r} enters twice"
        assert len(new.block_ids) == len(self.kv_config.groups), "one block table per KV-cache group"
        assert 0 < new.prompt_len <= len(new.token_ids), "prompt longer than the tokens"
        assert PLACEHOLDER_TOKEN not in new.token_ids, "a new request with unknown tokens"
        known = len(new.token_ids)
        assert 0 <= new.num_computed_tokens < known + forked, "a new request with nothing to compute"
        self._check_blocks(new.block_ids, new.num_computed_tokens)
        self.rows[new.slot] = MirrorRow(
            request_id=new.request_id,
            token_ids=list(new.token_ids),
            prompt_len=new.prompt_len,
            block_ids=[list(blocks) for blocks in new.block_ids],
            num_computed=new.num_computed_tokens,
            stop_token_ids=list(new.stop_token_ids),
            sampling=new.sampling,
            ext=new.ext,
        )

    def _append(self, plan: SchedulerOutput) -> None:
        assert len(set(plan.block_slots)) == len(plan.block_slots), "blocks of one request in two entries"
        for slot, block_ids in zip(plan.block_slots, plan.block_ids, strict=True):
            self._check_blocks(block_ids)
            held = {block for blocks in self.rows[slot].block_ids for block in blocks}
            for blocks, added in zip(self.rows[slot].block_ids, block_ids, strict=True):
                assert not held & set(added), f"slot {slot} is given a block that it has"
                blocks += added
        for slot, token_ids in zip(plan.token_slots, plan.token_ids, strict=True):
            assert not self.keeps_samples, f"slot {slot} is sent tokens that its worker has sampled itself"
            self.rows[slot].token_ids += token_ids

    def _check_blocks(self, block_ids: Sequence[Sequence[int]], num_computed: int = 0) -> None:
        """New entries of tables, which may be null blocks where a token after ``num_computed`` others looks at nothing."""
        firsts = [first_seen(num_computed, window, self.block_size) for window in self.kv_config.windows]
        needed = [block for blocks, first in zip(block_ids, firsts, strict=True) for block in blocks[first:]]
        spare = [
            block for blocks, first in zip(block_ids, firsts, strict=True) for block in blocks[:first] if block != NULL_BLOCK
        ]
        assert len(set(needed + spare)) == len(needed + spare), f"a block twice in the tables of one request: {block_ids}"
        for block_id in needed + spare:
            assert NULL_BLOCK < block_id < self.kv_config.num_blocks, f"no block {block_id}"

    def _seen(self, block_ids: Sequence[Sequence[int]], num_computed: int) -> list[list[int]]:
        """Tables with null blocks where a token after ``num_computed`` others looks at nothing."""
        seen = []
        for blocks, window in zip(block_ids, self.kv_config.windows, strict=True):
            first = min(first_seen(num_computed, window, self.block_size), len(blocks))
            seen.append([NULL_BLOCK] * first + list(blocks[first:]))
        return seen

    # -- checking what is to be computed -------------------------------------------------------------------------------

    def _check_rows(self, plan: SchedulerOutput) -> None:
        assert len(set(plan.slots)) == len(plan.slots) <= self.max_num_seqs, "a slot twice, or too many rows"
        assert plan.total_num_scheduled_tokens <= self.max_num_batched_tokens, "more tokens than the budget"
        entered = {new.slot for new in plan.new_requests}
        assert entered <= set(plan.slots), "a request enters the batch and computes nothing"
        drafts = dict(zip(plan.spec_slots, plan.spec_token_ids, strict=True))
        assert drafts.keys() <= set(plan.slots), "drafts for a row that is not in the plan"
        forked = set(plan.fork_slots)
        written: dict[int, int] = {}
        begins = {slot: row.num_computed for slot, row in self.rows.items()}
        for slot, count, computed, num_to_sample in zip(
            plan.slots, plan.num_scheduled_tokens, plan.num_computed_tokens, plan.num_to_sample, strict=True
        ):
            row, num_drafts = self.rows[slot], len(drafts.get(slot, ()))
            end, known = computed + count, len(row.token_ids) + num_drafts
            if slot in forked:
                assert count == num_drafts == 0, f"slot {slot} is forked and computes {count} tokens"
            else:
                assert count > num_drafts >= 0, f"slot {slot} computes {count} tokens, of them {num_drafts} drafts"
            assert computed == row.num_computed, f"slot {slot}: {computed} computed by the plan, {row.num_computed} really"
            assert end <= known, f"slot {slot} computes up to {end} of {known} tokens"
            assert num_to_sample == (1 + num_drafts if end == known else 0), f"slot {slot} samples {num_to_sample} tokens"
            for blocks in row.block_ids:
                assert end <= len(blocks) * self.block_size, f"slot {slot} has no block for token {end - 1}"
            for block in self._written_by(slot, computed, end):
                assert written.setdefault(block, slot) == slot, f"two rows write block {block}"
            row.num_computed = end
        self._check_shared(written, begins, {block for _, block in plan.block_copies})

    def _check_forks(self, plan: SchedulerOutput) -> None:
        """A forked row enters with its source's prompt, all of which it counts as computed, in a plan whose last prompt token
        the source row computes. Its partial block is due in the next plan."""
        assert len(set(plan.fork_slots)) == len(plan.fork_slots), "a slot is forked twice"
        row_of = {slot: index for index, slot in enumerate(plan.slots)}
        entered = {new.slot for new in plan.new_requests}
        for slot, origin in zip(plan.fork_slots, plan.fork_sources, strict=True):
            place = f"slot {slot}, forked from {origin}"
            assert slot in entered, f"{place}, was in the batch already"
            assert {slot, origin} <= row_of.keys(), f"{place}: both need a row"
            assert origin not in plan.fork_slots, f"{place}: the source computes nothing"
            row, source = self.rows[slot], self.rows[origin]
            assert row.token_ids == source.token_ids[: source.prompt_len], f"{place}, has another prompt"
            assert row.prompt_len == source.prompt_len == len(source.token_ids) == source.num_computed, (
                f"{place}, which does not end its prompt in this plan"
            )
            assert plan.num_to_sample[row_of[slot]] == plan.num_to_sample[row_of[origin]] == 1, f"{place}: both sample one token"
            full, partial = divmod(row.prompt_len, self.block_size)
            own, others = self._seen(row.block_ids, row.prompt_len), self._seen(source.block_ids, row.prompt_len)
            for blocks, originals in zip(own, others, strict=True):
                assert blocks[:full] == originals[:full], f"{place}, does not share its full blocks"
                if partial:
                    row.due_copies.append((originals[full], blocks[full]))

    def _written_by(self, slot: int, first: int, end: int) -> list[int]:
        """Blocks that hold the tokens from ``first`` to before ``end``."""
        places = slice(first // self.block_size, -(-end // self.block_size) if end > first else 0)
        return [block for blocks in self.rows[slot].block_ids for block in blocks[places]]

    def written_blocks(self, plan: SchedulerOutput) -> set[int]:
        """Blocks that the plan applied last writes."""
        rows = zip(plan.slots, plan.num_scheduled_tokens, plan.num_computed_tokens, strict=True)
        computed = {block for slot, count, begin in rows for block in self._written_by(slot, begin, begin + count)}
        return computed | {block for _, block in plan.block_copies}

    def _check_shared(self, written: dict[int, int], begins: dict[int, int], copied: set[int]) -> None:
        """A block that is written belongs to the writer alone, or the step fills it and the others only read it: they
        count all of it as computed (``begins``: tokens computed before the step). One that is ``copied`` to is nobody else's."""
        tables = {slot: self._seen(row.block_ids, begins[slot]) for slot, row in self.rows.items()}
        held = [block for block_ids in tables.values() for blocks in block_ids for block in blocks]
        for block in copied:
            assert held.count(block) < 2, f"block {block} is copied to and belongs to several requests"
        for slot, block_ids in tables.items():
            for place, block_id in ((p, b) for blocks in block_ids for p, b in enumerate(blocks)):
                writer, filled = written.get(block_id, slot), (place + 1) * self.block_size
                assert writer == slot or filled <= min(begins[slot], self.rows[writer].num_computed), (
                    f"slot {writer} writes block {block_id} of slot {slot}"
                )

    # -- after the step ------------------------------------------------------------------------------------------------

    def sampled(self, plan: SchedulerOutput, token_ids: Sequence[Sequence[int]]) -> None:
        """Tokens that the step sampled, aligned with ``plan.slots``. Rejected drafts are not computed after all."""
        for slot, num_to_sample, tokens in zip(plan.slots, plan.num_to_sample, token_ids, strict=True):
            row = self.rows[slot]
            if num_to_sample and tokens:
                row.num_computed -= num_to_sample - len(tokens)
            if self.keeps_samples:
                row.token_ids += tokens
