"""DefaultScheduler: continuous batching with mixed prefill and decode, composed of policies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from pegboard.config.models import EngineConfig
from pegboard.contracts.event_sink import EventSink
from pegboard.contracts.grammar import GrammarStates
from pegboard.contracts.scheduler import PauseState, RequestStatus, Scheduler
from pegboard.wire import (
    EngineCoreOutput,
    EngineCoreRequest,
    GrammarOutput,
    KVCacheConfig,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
)
from pegboard_plugins.kv.manager import StandardKVCacheManager
from pegboard_plugins.scheduling.integrity import check_books
from pegboard_plugins.scheduling.planning import Planner
from pegboard_plugins.scheduling.policies import Policies
from pegboard_plugins.scheduling.policy_guard import EventEmitter, PolicyGuard
from pegboard_plugins.scheduling.request import Request
from pegboard_plugins.scheduling.results import apply_results
from pegboard_plugins.scheduling.state import SchedulerState
from pegboard_plugins.scheduling.waiting import WaitingRequests

if TYPE_CHECKING:
    from pegboard.plugins import Composition

logger = logging.getLogger(__name__)


class DefaultScheduler(Scheduler):
    """Knows no prefill and no decode: every request has tokens computed and tokens to compute, and a step computes some.

    The order of service, admission, chunks and victims are the decisions of its policies; ``state`` holds the books,
    ``planning`` makes plans, ``results`` books what comes back. A plan moves ``num_computed`` at once and counts the tokens
    it will sample as placeholders, so the next step can be planned before this one's result is known.
    """

    def __init__(
        self,
        config: EngineConfig,
        composition: Composition,
        kv_config: KVCacheConfig,
        event_sinks: Sequence[EventSink] | None = None,
        grammars: GrammarStates | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``event_sinks``: None makes those that the composition has. Without ``grammars`` no request may have one. ``clock``:
        the time as policies are told."""
        limits = config.scheduler
        self.max_model_len = config.max_model_len or composition.spec.max_model_len
        allocator = composition.create("kv_allocator", num_blocks=kv_config.num_blocks, block_size=kv_config.block_size)
        self.kv = StandardKVCacheManager(
            allocator,
            kv_config.block_size,
            kv_config.windows,
            num_host_blocks=kv_config.num_host_blocks,
            max_chunk=min(limits.max_num_batched_tokens, self.max_model_len),
        )
        if kv_config.num_host_blocks:
            logger.warning("kv_cache.swap_space has no use here: this scheduler recomputes preempted requests; leave it out")
        guard = PolicyGuard(limits.strict)
        waiting = WaitingRequests(composition.create("request_queue"), guard)
        sinks = list(composition.create_all("event_sink").values()) if event_sinks is None else event_sinks
        self.state = SchedulerState(self.kv, waiting, guard, EventEmitter(sinks), limits.max_num_seqs, grammars, clock)
        self.policies = Policies(
            guard,
            admission=composition.create("admission_policy"),
            chunk=composition.create("chunk_policy"),
            preemption=composition.create("preemption_policy"),
        )
        self._num_stages = config.executor.pipeline_parallel_size
        self.planner = Planner(self.state, self.policies, limits.max_num_batched_tokens, self._num_stages)
        self._salt_with_length = composition.spec.prompt_length_rope
        self._num_arrived = 0
        self._told_about_pool = False

    def add_request(self, request: EngineCoreRequest) -> None:
        self._check(request)
        num_prompt = len(request.prompt_token_ids)
        # the last token is sampled but never computed: it needs no place in the cache
        max_len = min(num_prompt + request.max_tokens, self.max_model_len, self.kv.max_tokens_per_request + 1)
        if max_len < min(num_prompt + request.max_tokens, self.max_model_len) and not self._told_about_pool:
            self._told_about_pool = True
            logger.warning(
                "request %r may reach %d tokens, but the KV cache holds %d; such requests end with finish reason 'length' when "
                "it is full (raise kv_cache.memory or kv_cache.num_blocks). Told once.",
                request.request_id, num_prompt + request.max_tokens, self.kv.max_tokens_per_request,
            )  # fmt: skip
        self._num_arrived += 1
        self.state.enter(
            Request(request, self._num_arrived, max_len, salt_with_length=self._salt_with_length, in_turn=self._num_stages > 1)
        )

    def _check(self, request: EngineCoreRequest) -> None:
        num_prompt, request_id = len(request.prompt_token_ids), request.request_id
        if request_id in self.state.requests:
            raise ValueError(f"request id {request_id!r} is still in use; wait for its end, abort it, or choose another id")
        if num_prompt == 0:
            raise ValueError(f"request {request_id!r} has an empty prompt; it needs at least one token")
        if request.max_tokens < 1:
            raise ValueError(f"request {request_id!r} has max_tokens={request.max_tokens}; it must be at least 1")
        if num_prompt >= self.max_model_len:
            raise ValueError(
                f"request {request_id!r} has {num_prompt} prompt tokens, which leaves no room for output in "
                f"max_model_len={self.max_model_len}; shorten the prompt"
            )
        if request.grammar is not None and self.state.grammars is None:
            raise ValueError(f"request {request_id!r} has a grammar, but this scheduler was made without grammars")
        usable = self.kv.max_tokens_per_request
        if num_prompt > usable:
            raise ValueError(
                f"request {request_id!r} has {num_prompt} prompt tokens, but the KV cache holds {usable} in all "
                f"({self.kv.num_usable_blocks} blocks of {self.kv.block_size}); shorten the prompt, or raise kv_cache.memory "
                "or kv_cache.num_blocks"
            )

    def schedule(self) -> SchedulerOutput:
        return self.planner.make_plan()

    def grammar_output(self, plan: SchedulerOutput) -> GrammarOutput | None:
        grammars, slots = self.state.grammars, plan.grammar_slots
        if grammars is None or not slots:
            return None
        rows = next(step.rows for step in reversed(self.state.in_flight) if step.step_id == plan.step_id)
        request_of = dict(zip(plan.slots, rows, strict=True))
        return grammars.bitmasks(plan.step_id, slots, [request_of[slot].request_id for slot in slots])

    def update_from_output(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        return apply_results(self.state, plan, output)

    def finish_requests(self, request_ids: Iterable[str] | None, status: RequestStatus) -> list[str]:
        if not status.finished:
            raise ValueError(f"status {status} does not end a request; use one of the FINISHED states")
        state = self.state
        ids = list(state.requests) if request_ids is None else list(dict.fromkeys(request_ids))
        ended = [request_id for request_id in ids if request_id in state.requests]
        for request_id in ended:
            state.end(state.requests[request_id], status)
        if ended:
            state.drop_stopped()
        return ended

    def has_requests(self) -> bool:
        return bool(self.state.requests or self.state.finished_slots)

    def set_pause_state(self, state: PauseState) -> None:
        self.state.pause = state

    def reset_prefix_cache(self) -> bool:
        return self.kv.reset()

    def stats(self) -> SchedulerStats:
        state = self.state
        held = self.kv.num_usable_blocks - state.num_free_blocks - state.num_pending_blocks
        return SchedulerStats(
            step=state.step,
            num_running=len(state.running),
            num_waiting=len(state.waiting),
            kv_usage=held / self.kv.num_usable_blocks,
            prefix_queries=state.prefix_queries,
            prefix_hits=state.prefix_hits,
            num_preemptions=state.num_preemptions,
            num_passed_blocks=self.kv.num_passed,
            num_scheduled_tokens=state.num_scheduled_tokens,
            degraded=state.guard.degraded,
        )

    def check_integrity(self) -> None:
        check_books(self.state)
