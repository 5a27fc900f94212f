"""Forker: starts requests on the keys and values of another one that has the same prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.contracts.admission_policy import Admit
from pegboard.contracts.kv_cache_manager import Fork
from pegboard_plugins.scheduling.request import Request

if TYPE_CHECKING:
    from pegboard_plugins.scheduling.planning import Planner

Pairs = list[tuple[int, int]]


@dataclass(slots=True)
class PendingCopies:
    """(source, destination) blocks that the next plan has to copy for ``request``, if its stay ``kv_key`` lasts until then. The
    source block is safe without being held: the copies of a plan run before anything that the same plan writes."""

    request: Request
    kv_key: str
    pairs: Pairs

    @property
    def wanted(self) -> bool:
        return self.request.kv_key == self.kv_key


class Forker:
    """Works on the planner's present plan. Full blocks are shared, the last, partly filled one is copied.

    The copies of one plan are independent of their order: no block is written by one and read or written by another. Those of
    the previous plan's forks write blocks that their requests hold. Those of this plan's write fresh blocks, and a fresh block
    may be one that an older copy still reads, when its holder has gone: then the fork waits for the next plan.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.state = planner.state

    def join(self, request: Request, source: Request, admit: Admit) -> bool:
        """Start ``request`` with a row without tokens beside that of ``source``, which ends the prompt in this plan. The partial
        block is complete when this plan has run, so it is copied in the next. False, and nothing changed, without room."""
        state, planner, num_prompt = self.state, self.planner, request.num_prompt
        num_fresh = state.kv.num_groups if num_prompt % state.block_size else 0
        fork = self._fork(request, source, num_prompt, admit, num_fresh)
        if fork is None:
            return False
        if fork.copies:
            state.pending_copies.append(PendingCopies(request, request.kv_key, fork.copies))
        planner.enter(request, fork.block_ids, num_prompt, source)
        state.groups.end_prompt(request, state.step + (2 if fork.copies else 1))
        planner.plan.fork_slots.append(request.slot)
        planner.plan.fork_sources.append(source.slot)
        planner.add_row(request, 0, [])
        return True

    def follow(self, request: Request, source: Request, admit: Admit) -> bool:
        """Start ``request`` behind ``source``, whose prompt earlier plans have computed: it shares all but the last token, which
        it computes for its logits. False, and nothing changed, without room."""
        state, planner, num_shared = self.state, self.planner, request.num_prompt - 1
        fork = self._fork(request, source, num_shared, admit, state.kv.num_groups)
        if fork is None:
            return False
        read_before = {block for copies in planner.due_copies for block, _ in copies.pairs}
        if any(block in read_before for _, block in fork.copies):
            state.kv.free(request.kv_key)
            return False
        added = state.kv.allocate_slots(request.kv_key, request.num_prompt)
        assert added is not None, "the last token's block was counted"
        planner.plan.block_copies += fork.copies
        planner.enter(request, state.kv.block_ids(request.kv_key), num_shared, source)
        state.groups.end_prompt(request, state.step + 1)
        planner.add_row(request, 1, [])
        return True

    def _fork(self, request: Request, source: Request, num_tokens: int, admit: Admit, num_fresh: int) -> Fork | None:
        """``num_fresh``: blocks that ``request`` takes beside those that it shares."""
        if num_fresh + admit.reserve_blocks > self.state.num_free_blocks:
            return None
        return self.state.kv.fork(source.kv_key, request.kv_key, num_tokens)
