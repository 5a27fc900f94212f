"""Starter: which waiting requests enter the batch with the present plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.contracts.admission_policy import Admit, Hold, Skip
from pegboard.contracts.kv_cache_manager import PrefixHit
from pegboard.contracts.scheduler import PauseState, RequestStatus
from pegboard_plugins.scheduling.forking import Forker
from pegboard_plugins.scheduling.groups import Way
from pegboard_plugins.scheduling.request import Request

if TYPE_CHECKING:
    from pegboard_plugins.scheduling.planning import Planner


class Starter:
    """Works on the planner's present plan, after its running requests and only if none of them was preempted."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.state, self.policies = planner.state, planner.policies
        self.forker = Forker(planner)

    def admit(self) -> None:
        """Admit in queue order while budget, slots and blocks last. Requests that can join a prompt need no budget; those that
        wait for one are passed over, and a slot each is kept for them: whoever took it would have the prompt computed again."""
        state, planner, skipped, num_kept = self.state, self.planner, [], 0
        if state.pause is PauseState.PAUSED_NEW and not self.preempted_waiting():
            return
        while len(state.free_slots) > num_kept and (planner.budget > 0 or state.groups.any_ending()):
            request = state.waiting.peek()
            if request is None:
                break
            way, source = self._way(request)
            decision: Admit | Hold | Skip
            if self._is_paused(request):
                decision = Skip()
            elif way is Way.WAIT:
                num_kept += 1
                decision = Skip()
            elif way is Way.JOIN or planner.budget > 0:
                decision = self.policies.admit(state.view(request), state.situation(planner.budget))
            else:
                decision = Hold()
            if isinstance(decision, Skip):
                state.waiting.take(request)
                skipped.append(request)
            elif isinstance(decision, Hold) or not self._start(request, decision, way, source):
                break
        for request in reversed(skipped):
            state.waiting.prepend(request)
        if not state.running:
            self._start_somebody()

    def _way(self, request: Request) -> tuple[Way, Request | None]:
        if request.group is None:
            return Way.COMPUTE, None
        return request.group.way(request, self.state.step, self.state.can_follow)

    def _is_paused(self, request: Request) -> bool:
        return self.state.pause is PauseState.PAUSED_NEW and request.status is not RequestStatus.PREEMPTED

    def _start(self, request: Request, admit: Admit, way: Way, source: Request | None) -> bool:
        if source is None:
            return self._compute(request, admit)
        return self.forker.join(request, source, admit) if way is Way.JOIN else self.forker.follow(request, source, admit)

    def _start_somebody(self) -> None:
        """Nothing runs: the first waiting request starts, whatever the policies say. It fits, or it would not be here."""
        paused = self.state.pause is PauseState.PAUSED_NEW
        request = min(self.preempted_waiting(), key=lambda r: r.arrival) if paused else self.state.waiting.peek()
        if request is not None:
            self._compute(request, Admit(), forced=True)

    def preempted_waiting(self) -> list[Request]:
        """Those that had been running: a pause of new requests lets them finish."""
        return [r for r in self.state.waiting if r.status is RequestStatus.PREEMPTED]

    def _compute(self, request: Request, admit: Admit, forced: bool = False) -> bool:
        """Start ``request`` with its first chunk. Blocks are taken for all its known tokens at once, so that a prefill, once
        begun, never runs out of them half-way; but where layers have windows, which leave the first ones behind before they come
        to the last, for the chunk. False, and nothing changed, if they are not free."""
        state, planner = self.state, self.planner
        token_ids = request.token_ids
        hit = self._hit(request)
        count = remaining = len(token_ids) - hit.num_tokens
        if remaining > 1:
            available = planner.budget if admit.max_tokens is None else min(planner.budget, admit.max_tokens)
            count = self.policies.chunk_tokens(state.view(request), remaining, state.situation(available))
        if count == 0 and not forced:
            return False
        count = max(1, count)
        added = state.kv.allocate_slots(
            request.kv_key, hit.num_tokens + count, hit, admit.reserve_blocks, num_known=len(token_ids)
        )
        if added is None:
            return False
        planner.enter(request, added, hit.num_tokens)
        planner.add_row(request, count, [])
        planner.publish(request)
        return True

    def _hit(self, request: Request) -> PrefixHit:
        """What the prefix cache has of ``request``, before the first prompt position whose logprobs are still to be collected:
        position ``p`` gives those of token ``p + 1``."""
        kv, token_ids = self.state.kv, request.token_ids
        if request.lacks_entries:
            token_ids = token_ids[: request.num_entries + 1]
        return kv.get_computed_blocks(request.kv_key, token_ids, request.salt)
