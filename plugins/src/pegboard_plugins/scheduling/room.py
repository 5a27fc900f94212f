"""RoomMaker: finds blocks for a running request, and preempts others when there are none."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pegboard.contracts.kv_cache_manager import BlockIds
from pegboard.contracts.preemption_policy import BlockNeed
from pegboard.contracts.scheduler import RequestStatus
from pegboard_plugins.scheduling.request import Request

if TYPE_CHECKING:
    from pegboard_plugins.scheduling.planning import Planner

logger = logging.getLogger(__name__)


class RoomMaker:
    """Works on the planner's present plan. The oldest running request is never a victim, so it always finishes."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.state, self.policies = planner.state, planner.policies
        self._told_about_swap = False

    def grow(self, request: Request, num_tokens: int, preempting: bool = False) -> bool:
        """Give ``request`` blocks for ``num_tokens`` tokens. False if they are not there now: it sits out this step, or it
        was preempted itself."""
        added = self.state.kv.allocate_slots(request.kv_key, num_tokens)
        if added is None and preempting:
            added = self._make_room(request, num_tokens)
        if added is None:
            return False
        request.capacity = self.state.capacity(request)
        self.planner.plan.block_slots.append(request.slot)
        self.planner.plan.block_ids.append(added)
        return True

    def _make_room(self, request: Request, num_tokens: int) -> BlockIds | None:
        state = self.state
        missing = state.kv.num_missing(request.kv_key, num_tokens)
        victims: list[Request] | None = None
        while state.num_free_blocks + state.num_coming_blocks < missing:
            if victims is None:
                victims = self._victims(request, missing)
            if not victims:
                if state.kv.has_windows and request.last_step > state.processed_step:
                    return None  # when its plans in flight are over it gives up what is behind its windows
                raise RuntimeError(
                    f"request {request.request_id!r} runs alone and {type(state.kv.allocator).__qualname__} does not give it "
                    f"{missing} of {state.kv.num_usable_blocks} blocks"
                )
            victim = victims.pop(0)
            self.preempt(victim)
            if victim is request:
                return None
        return state.kv.allocate_slots(request.kv_key, num_tokens)  # None while plans in flight still use what is to be free

    def _victims(self, request: Request, missing: int) -> list[Request]:
        candidates = self._candidates()
        if not candidates:
            return []
        views = [self.state.view(r) for r in candidates.values()]
        need = BlockNeed(request.request_id, missing - self.state.num_free_blocks)
        ids = self.policies.victims(need, views, self.state.situation(self.planner.budget))
        return [candidates[request_id] for request_id in ids]

    def _candidates(self) -> dict[str, Request]:
        """Running requests but the oldest, in order of admission."""
        running = [r for r in self.state.running if r.status is RequestStatus.RUNNING]
        return {r.request_id: r for r in running[1:]}

    def preempt_proactively(self) -> None:
        if self.policies.preempts_proactively and len(self.state.running) > 1:
            candidates = self._candidates()
            views = [self.state.view(r) for r in candidates.values()]
            for request_id in self.policies.proactive(views, self.state.situation(self.planner.budget)):
                self.preempt(candidates[request_id])

    def preempt(self, request: Request) -> None:
        """Take ``request`` out of the batch and out of the present plan; its tokens are computed again later."""
        if self.policies.mode(self.state.view(request)) == "swap" and not self._told_about_swap:
            self._told_about_swap = True
            logger.info("this scheduler keeps no blocks on the host: a request to be swapped out is recomputed instead")
        self.planner.drop_row(request)
        self.planner.preempted.append(request)
        self.planner.plan.preempted_slots.append(self.state.preempt(request))
