"""SchedulerState: who runs, who waits, which slots and blocks they hold. All changes of a request's state happen here."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pegboard.contracts.event_sink import Event
from pegboard.contracts.grammar import GrammarStates
from pegboard.contracts.scheduler import PauseState, RequestStatus
from pegboard.contracts.views import RequestView, SchedulingView
from pegboard_plugins.kv.manager import StandardKVCacheManager
from pegboard_plugins.scheduling.forking import PendingCopies
from pegboard_plugins.scheduling.groups import PromptGroups
from pegboard_plugins.scheduling.policy_guard import EventEmitter, PolicyGuard
from pegboard_plugins.scheduling.request import NO_SLOT, Request
from pegboard_plugins.scheduling.waiting import WaitingRequests


@dataclass(slots=True)
class InFlight:
    """A plan whose result is not in yet, and the requests of its rows."""

    step_id: int
    rows: list[Request]


class SchedulerState:
    """The scheduler's books.

    ``running`` is in order of admission: the first is the oldest and is never preempted. Blocks given up while a plan in
    flight may still write them are kept in ``deferred`` until that plan's result is in.
    """

    def __init__(
        self,
        kv: StandardKVCacheManager,
        waiting: WaitingRequests,
        guard: PolicyGuard,
        events: EventEmitter,
        max_num_seqs: int,
        grammars: GrammarStates | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.kv, self.waiting, self.guard, self.events, self.grammars = kv, waiting, guard, events, grammars
        self.max_num_seqs, self.clock = max_num_seqs, clock
        self.block_size = kv.block_size
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.groups = PromptGroups()
        self.special: dict[str, Request] = {}
        """Running requests whose results take more than appending a token."""
        self.in_flight: deque[InFlight] = deque()
        self.deferred: list[tuple[int, str]] = []
        """(step that must be over, key in the KV manager)."""
        self.finished_slots: list[int] = []
        """Slots that the next plan has to tell the workers about."""
        self.pending_copies: list[PendingCopies] = []
        """What the next plan has to copy."""
        self.free_slots = list(range(max_num_seqs))
        self.step = 0
        self.processed_step = 0
        self.pause = PauseState.UNPAUSED
        self.num_preemptions = 0
        self.num_scheduled_tokens = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    # -- changes of state ----------------------------------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.groups.join(request)
        self.waiting.add(request)
        self.emit("queued", request)

    def start(self, request: Request, num_computed: int, source: Request | None = None) -> None:
        """Waiting to running; its blocks have been allocated. ``num_computed`` tokens of them were found in the cache, or are
        those of ``source``, of which it was forked."""
        self.waiting.take(request)
        resumed = request.status is RequestStatus.PREEMPTED
        if not resumed:
            request.num_cached = num_computed if source is None else source.num_cached
        if not resumed and source is None:
            self.prefix_queries += request.num_prompt
            self.prefix_hits += num_computed
        request.status = RequestStatus.RUNNING
        request.slot = heapq.heappop(self.free_slots)
        request.first_step = self.step
        request.num_computed = num_computed
        request.num_sent = len(request.token_ids)
        if self.kv.caches_prefixes or self.kv.has_windows:
            following = (num_computed // self.block_size + 1) * self.block_size
            request.next_commit = following if source is None else min(following, source.next_commit)
        if source is None:
            self.groups.begin_prompt(request)
        if request.is_special:
            self.special[request.request_id] = request
        self.running.append(request)
        self.emit("resumed" if resumed else "scheduled", request)

    def publish(self, request: Request, num_computed: int) -> None:
        """Let others share the blocks of ``request`` that ``num_computed`` tokens fill, if there are new ones; plans in flight
        may still compute them."""
        if num_computed >= request.next_commit:
            self.kv.commit(request.kv_key, request.token_ids, num_computed, request.salt)
            if not self.kv.has_windows:
                request.next_commit = (num_computed // self.block_size + 1) * self.block_size

    def settle(self, request: Request, num_computed: int) -> None:
        """The result of the plan that computed ``num_computed`` tokens of ``request`` is in: publish the blocks that they fill,
        and give up those behind a window. Plans in flight, and those to come, neither read nor write what lies there: they
        compute later tokens."""
        if num_computed >= request.next_commit:
            self.kv.commit(request.kv_key, request.token_ids, num_computed, request.salt)
            if self.kv.has_windows:
                self.kv.release_passed(request.kv_key, num_computed)
            request.next_commit = (num_computed // self.block_size + 1) * self.block_size

    def capacity(self, request: Request) -> int:
        """Tokens for which all KV-cache groups have places."""
        return self.kv.num_places_of(request.kv_key) * self.block_size

    def can_follow(self, request: Request) -> bool:
        """Whether the blocks of ``request`` hold what the last token of its prompt looks at."""
        return not self.kv.has_windows or self.kv.can_fork(request.kv_key, request.num_prompt - 1)

    def preempt(self, request: Request) -> int:
        """Running to preempted; returns the slot it had. The caller takes it off ``running`` and gives it back to ``waiting``."""
        self._release_blocks(request)
        slot = self._release_slot(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._leave_batch(request)
        self.emit("preempted", request)
        return slot

    def end(self, request: Request, status: RequestStatus) -> None:
        """Any state to finished. The caller takes a running one off ``running``."""
        if request.slot != NO_SLOT:
            self.finished_slots.append(self._release_slot(request))
        else:
            self.waiting.remove(request)
        self._release_blocks(request)
        request.status = status
        del self.requests[request.request_id]
        self._leave_batch(request)
        self.groups.end(request)
        if self.grammars is not None and request.wire.grammar is not None:
            self.grammars.forget(request.request_id)
        self.emit("finished", request, status=status.value)

    def drop_stopped(self) -> None:
        """Take requests that do not run any more off ``running``."""
        self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]

    def _leave_batch(self, request: Request) -> None:
        self.groups.leave_batch(request)
        self.special.pop(request.request_id, None)
        request.leave_batch()

    def _release_slot(self, request: Request) -> int:
        heapq.heappush(self.free_slots, request.slot)
        return request.slot

    def _release_blocks(self, request: Request) -> None:
        if request.slot != NO_SLOT and request.last_step > self.processed_step:
            self.deferred.append((request.last_step, request.kv_key))
        else:
            self.kv.free(request.kv_key)

    # -- plans in flight -----------------------------------------------------------------------------------------------

    def processed(self, step_id: int) -> None:
        """The result of ``step_id`` is in: what waited for it can be freed."""
        self.processed_step = step_id
        if self.deferred:
            for step, key in self.deferred:
                if step <= step_id:
                    self.kv.free(key)
            self.deferred = [entry for entry in self.deferred if entry[0] > step_id]

    @property
    def num_free_blocks(self) -> int:
        return self.kv.allocator.num_free

    @property
    def num_pending_blocks(self) -> int:
        """Blocks that become free when the plans in flight are over."""
        return self.kv.num_freed_by([key for _, key in self.deferred]) if self.deferred else 0

    @property
    def num_coming_blocks(self) -> int:
        """The same, and those that running requests then have behind their windows."""
        if not self.kv.has_windows:
            return self.num_pending_blocks
        computed = {
            r.kv_key: r.num_computed // self.block_size * self.block_size  # what is given up at a block's end, not between
            for r in self.running
            if r.last_step > self.processed_step and r.num_computed >= r.next_commit and r.status is RequestStatus.RUNNING
        }
        return self.kv.num_freed_by([key for _, key in self.deferred], computed)

    # -- what others see -----------------------------------------------------------------------------------------------

    def view(self, request: Request) -> RequestView:
        return request.view(self.kv.num_blocks_of(request.kv_key))

    def situation(self, token_budget: int) -> SchedulingView:
        return SchedulingView(
            step=self.step,
            now=self.clock(),
            token_budget=token_budget,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            max_num_seqs=self.max_num_seqs,
            num_blocks=self.kv.num_usable_blocks,
            num_free_blocks=self.num_free_blocks,
            block_size=self.block_size,
            strict=self.guard.strict,
        )

    def emit(self, kind: str, request: Request, **data: Any) -> None:
        if self.events:
            self.events.emit(Event(kind, request.request_id, self.step, time.monotonic(), data))
