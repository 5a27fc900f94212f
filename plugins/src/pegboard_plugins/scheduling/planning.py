"""Planner: what the next step computes. Running requests first, then admissions, all mixed in one plan."""

from __future__ import annotations

from pegboard.contracts.admission_policy import Admit, Hold, Skip
from pegboard.contracts.scheduler import PauseState, RequestStatus
from pegboard.wire import NewRequestData, SchedulerOutput
from pegboard_plugins.scheduling.policies import Policies
from pegboard_plugins.scheduling.request import Request
from pegboard_plugins.scheduling.room import RoomMaker
from pegboard_plugins.scheduling.state import InFlight, SchedulerState


class Planner:
    """Fills one ``SchedulerOutput`` per call of ``make_plan``. Holds nothing from one step to the next.

    ``sends_tokens``: the workers do not all see the samples (pipeline stages), so known tokens travel in the plan, and a
    request waits for its result before it is scheduled again.
    """

    def __init__(self, state: SchedulerState, policies: Policies, max_num_batched_tokens: int, sends_tokens: bool) -> None:
        self.state, self.policies = state, policies
        self.max_num_batched_tokens = max_num_batched_tokens
        self.sends_tokens = sends_tokens
        self.room = RoomMaker(self)
        self.budget = 0
        self.plan = SchedulerOutput(step_id=0)
        self.rows: list[Request] = []
        self.preempted: list[Request] = []
        self._put_off: Request | None = None
        """First running request for which the chunk policy wanted no token in this step."""
        self._chunks: list[Request] = []
        """Rows of this plan that compute more than one known token."""

    def make_plan(self) -> SchedulerOutput:
        state = self.state
        state.step += 1
        self.plan = SchedulerOutput(step_id=state.step, finished_slots=state.finished_slots)
        state.finished_slots = []
        self.budget, self.rows, self.preempted, self._put_off = self.max_num_batched_tokens, [], [], None
        self._chunks = []
        if state.pause is not PauseState.PAUSED_ALL:
            self.room.preempt_proactively()
            self._plan_running()
            if self._put_off is not None and not self.rows:
                self._add_row(self._put_off, 1, [])
            if self.preempted:
                self._put_back()
            elif state.waiting:
                for request in self._chunks:
                    self._publish(request)
                self._admit()
        return self._close()

    # -- running requests ----------------------------------------------------------------------------------------------

    def _plan_running(self) -> None:
        """One row per running request, oldest first: its last token, or the next chunk of what it has to compute."""
        plan, sends_tokens, preempted = self.plan, self.sends_tokens, self.preempted
        add_row, add_slot, add_count = self.rows.append, plan.slots.append, plan.num_scheduled_tokens.append
        add_computed, add_sample = plan.num_computed_tokens.append, plan.num_to_sample.append
        running_status = RequestStatus.RUNNING
        budget, rows_left = self.budget, len(self.state.running)
        for request in self.state.running:
            rows_left -= 1
            if budget <= 0:
                break
            if preempted and request.status is not running_status:
                continue
            in_flight = request.num_placeholders
            target = len(request.token_ids) + in_flight
            if in_flight and (target >= request.max_len or sends_tokens or request.num_drafts):
                continue
            computed = request.num_computed
            if target - computed != 1 or target > request.capacity or request.spec_token_ids:
                self.budget = budget
                self._plan_with_care(request, target - computed, rows_left)
                budget = self.budget
                continue
            # the common case, written out: one token, and room for it
            request.num_computed = target
            request.num_placeholders = in_flight + 1
            add_row(request)
            add_slot(request.slot)
            add_computed(computed)
            add_count(1)
            add_sample(1)
            budget -= 1
        self.budget = budget

    def _plan_with_care(self, request: Request, count: int, rows_left: int) -> None:
        """A chunk, drafts, or one token that needs another block."""
        available = max(1, self.budget - rows_left)  # a long prompt leaves one token to each request behind it
        drafts: list[int] = []
        if count > 1:
            count = self.policies.chunk_tokens(self.state.view(request), count, self.state.situation(available))
            if count == 0:
                self._put_off = self._put_off or request
                return
        elif request.spec_token_ids and not request.num_placeholders:
            room_left = request.max_len - len(request.token_ids) - 1
            drafts = request.spec_token_ids[: max(0, min(available - 1, room_left))]
        need = request.num_computed + count
        if need + len(drafts) > request.capacity and not (drafts and self.room.grow(request, need + len(drafts))):
            drafts = []  # they are not worth a preemption
            if need > request.capacity and not self.room.grow(request, need, preempting=True):
                return
        self._add_row(request, count, drafts)

    def _add_row(self, request: Request, count: int, drafts: list[int]) -> None:
        plan, computed = self.plan, request.num_computed
        samples = computed + count >= len(request.token_ids) + request.num_placeholders
        num_to_sample = 1 + len(drafts) if samples else 0
        count += len(drafts)
        self.rows.append(request)
        plan.slots.append(request.slot)
        plan.num_scheduled_tokens.append(count)
        plan.num_computed_tokens.append(computed)
        plan.num_to_sample.append(num_to_sample)
        request.spec_token_ids = []
        if drafts:
            plan.spec_slots.append(request.slot)
            plan.spec_token_ids.append(drafts)
            request.num_drafts = len(drafts)
        if count > num_to_sample:
            self._chunks.append(request)
        request.num_computed = computed + count
        request.num_placeholders += num_to_sample
        self.budget -= count

    def _publish(self, request: Request) -> None:
        """Let others share what this plan computes of a prompt, from this plan on: a step writes the keys and values of all
        its rows before any row reads them. Only for rows that stay in the plan: nothing is preempted once admissions begin."""
        self.state.commit(request, min(request.num_computed, len(request.token_ids)))

    def drop_row(self, request: Request) -> None:
        """Take what this plan holds of a request that is about to be preempted back out."""
        plan, slot = self.plan, request.slot
        if self._put_off is request:
            self._put_off = None
        if slot in plan.slots:
            row = plan.slots.index(slot)
            self.budget += plan.num_scheduled_tokens[row]
            for column in (plan.slots, plan.num_scheduled_tokens, plan.num_computed_tokens, plan.num_to_sample, self.rows):
                del column[row]
        for slots, values in ((plan.block_slots, plan.block_ids), (plan.spec_slots, plan.spec_token_ids)):
            while slot in slots:
                at = slots.index(slot)
                del slots[at], values[at]

    def _put_back(self) -> None:
        """Preempted requests wait in the order of their arrival, those of earlier steps among them, before all others where
        the queue lets them."""
        self.state.drop_stopped()
        waiting = self.state.waiting
        earlier = self._preempted_waiting()
        for request in earlier:
            waiting.remove(request)
        for request in sorted(earlier + self.preempted, key=lambda r: r.arrival, reverse=True):
            waiting.prepend(request)

    # -- waiting requests ----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit in queue order while budget, slots and blocks last."""
        state, skipped = self.state, []
        if state.pause is PauseState.PAUSED_NEW and not self._preempted_waiting():
            return
        while self.budget > 0 and state.free_slots:
            request = state.waiting.peek()
            if request is None:
                break
            decision = self._may_start(request)
            if isinstance(decision, Skip):
                state.waiting.take(request)
                skipped.append(request)
            elif isinstance(decision, Hold) or not self._start(request, decision):
                break
        for request in reversed(skipped):
            state.waiting.prepend(request)
        if not state.running:
            self._start_somebody()

    def _may_start(self, request: Request) -> Admit | Hold | Skip:
        if self.state.pause is PauseState.PAUSED_NEW and request.status is not RequestStatus.PREEMPTED:
            return Skip("paused")
        return self.policies.admit(self.state.view(request), self.state.situation(self.budget))

    def _start_somebody(self) -> None:
        """Nothing runs: the first waiting request starts, whatever the policies say. It fits, or it would not be here."""
        paused = self.state.pause is PauseState.PAUSED_NEW
        request = min(self._preempted_waiting(), key=lambda r: r.arrival) if paused else self.state.waiting.peek()
        if request is not None:
            self._start(request, Admit(), forced=True)

    def _preempted_waiting(self) -> list[Request]:
        """Those that had been running: a pause of new requests lets them finish."""
        return [r for r in self.state.waiting if r.status is RequestStatus.PREEMPTED]

    def _start(self, request: Request, admit: Admit, forced: bool = False) -> bool:
        """Admit ``request`` with its first chunk. Blocks are taken for all its known tokens at once, so that a prefill, once
        begun, never runs out of them half-way; False, and nothing changed, if they are not free."""
        state = self.state
        token_ids = request.token_ids
        hit = state.kv.get_computed_blocks(request.kv_key, token_ids, request.salt)
        count = remaining = len(token_ids) - hit.num_tokens
        if remaining > 1:
            available = self.budget if admit.max_tokens is None else min(self.budget, admit.max_tokens)
            count = self.policies.chunk_tokens(state.view(request), remaining, state.situation(available))
        if count == 0 and not forced:
            return False
        added = state.kv.allocate_slots(request.kv_key, len(token_ids), hit, admit.reserve_blocks)
        if added is None:
            return False
        request.capacity = len(added[0]) * state.block_size
        state.start(request, hit.num_tokens)
        self.plan.new_requests.append(
            NewRequestData(
                slot=request.slot,
                request_id=request.request_id,
                token_ids=list(token_ids),
                prompt_len=request.num_prompt,
                sampling=request.wire.sampling,
                stop_token_ids=request.wire.stop_token_ids,
                block_ids=added,
                num_computed_tokens=hit.num_tokens,
                ext=request.ext,
            )
        )
        self._add_row(request, max(1, count), [])
        self._publish(request)
        return True

    # -- the finished plan ---------------------------------------------------------------------------------------------

    def _close(self) -> SchedulerOutput:
        plan, rows, state = self.plan, self.rows, self.state
        step = plan.step_id
        for request in rows:
            request.last_step = step
        if rows:
            state.in_flight.append(InFlight(step, rows))
            state.num_scheduled_tokens += sum(plan.num_scheduled_tokens)
        if self.sends_tokens:
            for request in rows:
                known = len(request.token_ids)
                if known > request.num_sent:
                    plan.token_slots.append(request.slot)
                    plan.token_ids.append(request.token_ids[request.num_sent :])
                    request.num_sent = known
        return plan
