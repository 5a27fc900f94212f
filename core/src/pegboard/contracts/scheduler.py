"""Scheduler: decides what every step computes and what becomes of its results."""

from __future__ import annotations

import abc
import enum
from collections.abc import Iterable
from typing import Final

from pegboard.wire import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
)

API: Final = 1


class RequestStatus(enum.Enum):
    """States of a request inside the engine core."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "finished_stopped"
    FINISHED_LENGTH_CAPPED = "finished_length_capped"
    FINISHED_ABORTED = "finished_aborted"
    FINISHED_IGNORED = "finished_ignored"
    FINISHED_ERROR = "finished_error"

    @property
    def finished(self) -> bool:
        return self in FINISH_REASONS

    @property
    def finish_reason(self) -> FinishReason | None:
        return FINISH_REASONS.get(self)


FINISH_REASONS: Final = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}


class PauseState(enum.Enum):
    """UNPAUSED: all go on. PAUSED_NEW: running ones finish, none is admitted. PAUSED_ALL: nothing is scheduled."""

    UNPAUSED = "unpaused"
    PAUSED_NEW = "paused_new"
    PAUSED_ALL = "paused_all"


class Scheduler(abc.ABC):
    """The whole scheduler. Constructed, by name, with those that it takes of ``config``, ``composition`` (its policies),
    ``kv_config``, ``event_sinks``, which it feeds and the engine core closes, ``grammars`` (``GrammarStates``), and ``clock``: a
    function that gives the time for decisions, in seconds of ``time.time()``. Several engines may share their ranks and must then
    plan alike: decisions depend on requests, results and this clock alone.

    Its provider says what it can do beyond plain requests; the engine core refuses other requests at once:

    - ``grammars``: rows of requests with a grammar that sample are listed in ``grammar_slots``, their masks given out by
      ``grammar_output``, their tokens accepted, and a request ends with its grammar (``FINISHED_STOPPED``);
    - ``prompt_logprobs``: a request that wants them has every prompt position computed that has not been reported yet, also
      where a prefix is cached, and reports each once;
    - ``windows``: it gives up blocks behind the sliding windows of ``kv_config.groups`` (see ``KVCacheManager``), so that a
      request of ``kv_config.tokens_per_request`` tokens fits. Without it the groups of ``kv_config`` have no windows.

    Requests of one ``group`` may be computed as if they had nothing in common; sharing is an optimisation.

    Invariants:

    - A plan schedules at most ``max_num_batched_tokens`` tokens and ``max_num_seqs`` rows; a slot belongs to one request.
    - Every request that was added ends with exactly one output that has a ``finish_reason``, unless it was ended through
      ``finish_requests`` (whose caller knows).
    - Some request always makes progress; a request that can never fit ends at once with ``FINISHED_ERROR``.
    - ``update_from_output`` takes results in the order of the plans; up to ``max_concurrent_batches`` plans may be
      outstanding. Results of requests that were preempted or finished in between are dropped.
    - Blocks are returned to the pool only when no plan in flight can still write them.
    - All methods are called from one thread.
    """

    @abc.abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue ``request``. Raises ``ValueError`` on an id that is still in use, or a prompt that can never fit the KV pool."""

    @abc.abstractmethod
    def schedule(self) -> SchedulerOutput:
        """Plan the next step. ``plan.empty`` when nothing can be computed now."""

    @abc.abstractmethod
    def update_from_output(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Book the results of ``plan``: append tokens, check stop conditions, free what ended."""

    @abc.abstractmethod
    def finish_requests(self, request_ids: Iterable[str] | None, status: RequestStatus) -> list[str]:
        """End requests from outside (None: all). Unknown and finished ids are ignored. Returns the ids that it ended."""

    @abc.abstractmethod
    def has_requests(self) -> bool:
        """True while any request is unfinished, or a finished slot has not been told to the workers yet."""

    def grammar_output(self, plan: SchedulerOutput) -> GrammarOutput | None:
        """Bitmasks for ``plan.grammar_slots``, computed while the forward runs."""
        return None

    @abc.abstractmethod
    def set_pause_state(self, state: PauseState) -> None: ...

    @abc.abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks. False, and nothing changed, while requests hold blocks."""

    @abc.abstractmethod
    def stats(self) -> SchedulerStats: ...

    @abc.abstractmethod
    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the books do not balance. For tests, and when idle in debug mode."""
