"""Planner: what the next step computes. Running requests first, then admissions, all mixed in one plan."""

from __future__ import annotations

from operator import attrgetter

from msgspec.structs import replace

from pegboard.contracts.kv_cache_manager import BlockIds
from pegboard.contracts.scheduler import PauseState, RequestStatus
from pegboard.wire import NewRequestData, SchedulerOutput
from pegboard_plugins.scheduling.forking import PendingCopies
from pegboard_plugins.scheduling.policies import Policies
from pegboard_plugins.scheduling.request import Request
from pegboard_plugins.scheduling.room import RoomMaker
from pegboard_plugins.scheduling.starting import Starter
from pegboard_plugins.scheduling.state import InFlight, SchedulerState

_last_step = attrgetter("last_step")


class Planner:
    """Fills one ``SchedulerOutput`` per call of ``make_plan``. Holds nothing from one step to the next.

    ``num_stages``: of the pipeline. With several, the workers do not all see the samples, so known tokens travel in the plan. And
    of the requests that generate a plan takes no more than its share: all in one would leave the other stages idle.
    """

    def __init__(self, state: SchedulerState, policies: Policies, max_num_batched_tokens: int, num_stages: int) -> None:
        self.state, self.policies = state, policies
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_stages = num_stages
        self.room, self.starter = RoomMaker(self), Starter(self)
        self.budget = 0
        self.plan = SchedulerOutput(step_id=0)
        self.rows: list[Request] = []
        self.preempted: list[Request] = []
        self.due_copies: list[PendingCopies] = []
        """What this plan has to copy for forks of the previous one, those that have ended among them."""
        self._put_off: Request | None = None
        """First running request for which the chunk policy wanted no token in this step."""
        self._chunks: list[Request] = []
        """Rows of this plan that compute more than one known token."""

    def make_plan(self) -> SchedulerOutput:
        state = self.state
        state.step += 1
        self.plan = SchedulerOutput(step_id=state.step, finished_slots=state.finished_slots)
        state.finished_slots = []
        self.due_copies, state.pending_copies = state.pending_copies, []
        self.budget, self.rows, self.preempted, self._put_off = self.max_num_batched_tokens, [], [], None
        self._chunks = []
        if state.pause is not PauseState.PAUSED_ALL:
            self.room.preempt_proactively()
            self._plan_running()
            if self._put_off is not None and not self.rows:
                self._plan_put_off(self._put_off)
            if self.preempted:
                self._put_back()
            elif state.waiting:
                for request in self._chunks:
                    self.publish(request)
                self.starter.admit()
        return self._close()

    # -- running requests ----------------------------------------------------------------------------------------------

    def _plan_running(self) -> None:
        """One row per running request: its last token, or the next chunk of what it has to compute. Oldest first; with stages
        those first that have waited longest, so that an executor which does not overlap steps serves all of them in turn."""
        plan, preempted = self.plan, self.preempted
        add_row, add_slot, add_count = self.rows.append, plan.slots.append, plan.num_scheduled_tokens.append
        add_computed, add_sample = plan.num_computed_tokens.append, plan.num_to_sample.append
        running_status = RequestStatus.RUNNING
        running = self.state.running
        budget, rows_left = self.budget, len(running)
        singles_left = -(-rows_left // self.num_stages)
        for request in running if self.num_stages == 1 else sorted(running, key=_last_step):
            rows_left -= 1
            if budget <= 0:
                break
            if preempted and request.status is not running_status:
                continue
            in_flight = request.num_placeholders
            target = len(request.token_ids) + in_flight
            if in_flight and (target >= request.max_len or request.in_turn or request.num_drafts):
                continue
            computed = request.num_computed
            single = target - computed == 1
            if single:
                if not singles_left:
                    continue  # for another plan in flight
                singles_left -= 1
            if not single or target > request.capacity or request.spec_token_ids:
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
        self.add_row(request, count, drafts)

    def _plan_put_off(self, request: Request) -> None:
        """Nobody else has a row, and something must move."""
        need = request.num_computed + 1
        if need <= request.capacity or self.room.grow(request, need, preempting=True):
            self.add_row(request, 1, [])

    def add_row(self, request: Request, count: int, drafts: list[int]) -> None:
        """``count`` tokens, none for a forked request, whose prompt another row computes."""
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

    def publish(self, request: Request) -> None:
        """Let others share what this plan computes of a prompt, from this plan on: a step writes the keys and values of all
        its rows before any row reads them. Only for rows that stay in the plan: nothing is preempted once admissions begin."""
        self.state.publish(request, min(request.num_computed, len(request.token_ids)))

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
        earlier = self.starter.preempted_waiting()
        for request in earlier:
            waiting.remove(request)
        for request in sorted(earlier + self.preempted, key=lambda r: r.arrival, reverse=True):
            waiting.prepend(request)

    # -- requests that start -------------------------------------------------------------------------------------------

    def enter(self, request: Request, block_ids: BlockIds, num_computed: int, source: Request | None = None) -> None:
        """``request`` enters the batch with its block table; ``source`` is the one that it was forked from."""
        request.capacity = self.state.capacity(request)
        self.state.start(request, num_computed, source)
        wire, sampling = request.wire, request.wire.sampling
        if sampling.prompt_logprobs is not None and not request.lacks_entries:
            sampling = replace(sampling, prompt_logprobs=None)  # computing them again would cost as much as the prompt
        self.plan.new_requests.append(
            NewRequestData(
                slot=request.slot,
                request_id=request.request_id,
                token_ids=list(request.token_ids),
                prompt_len=request.num_prompt,
                sampling=sampling,
                stop_token_ids=wire.stop_token_ids,
                block_ids=block_ids,
                num_computed_tokens=num_computed,
                bad_word_ids=wire.bad_word_ids,
                ext=request.ext,
            )
        )

    # -- the finished plan ---------------------------------------------------------------------------------------------

    def _close(self) -> SchedulerOutput:
        plan, rows, state = self.plan, self.rows, self.state
        step = plan.step_id
        for request in rows:
            request.last_step = step
        if self.due_copies:
            self._add_due_copies()
        if rows:
            state.in_flight.append(InFlight(step, rows))
            state.num_scheduled_tokens += sum(plan.num_scheduled_tokens)
        if state.groups.computing:
            state.groups.settle(step)
        if state.special:
            columns = zip(rows, plan.slots, plan.num_to_sample, strict=True)
            plan.grammar_slots = [slot for r, slot, samples in columns if samples and r.wire.grammar is not None]
        if self.num_stages > 1:
            for request in rows:
                known = len(request.token_ids)
                if known > request.num_sent:
                    plan.token_slots.append(request.slot)
                    plan.token_ids.append(request.token_ids[request.num_sent :])
                    request.num_sent = known
        return plan

    def _add_due_copies(self) -> None:
        """For those that were not preempted in this plan. It writes their blocks, whether it has a row of them or not."""
        wanted = [copies for copies in self.due_copies if copies.wanted]
        self.plan.block_copies = [pair for copies in wanted for pair in copies.pairs] + self.plan.block_copies
        if self.rows:
            for copies in wanted:
                copies.request.last_step = self.plan.step_id
