"""EngineCore: executor and scheduler, and the loop that joins them. Knows token ids only; text is the front end's."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pegboard.contracts.executor import ALL, Executor, ExecutorFailed, Ranks
from pegboard.contracts.scheduler import RequestStatus, Scheduler
from pegboard.engine.ending import Ending
from pegboard.engine.errors import EngineDeadError
from pegboard.engine.grammars import GrammarManager
from pegboard.engine.info import EngineInfo, check_context
from pegboard.engine.kv_sizing import kv_cache_config
from pegboard.engine.lockstep import Lockstep
from pegboard.wire import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
)

if TYPE_CHECKING:
    from pegboard.config import EngineConfig
    from pegboard.plugins import Composition

log = logging.getLogger(__name__)

GRAMMAR_WAIT: Final = 0.02
"""Seconds that a step without anything to compute waits for a grammar. Short: nothing else is heard meanwhile."""


@dataclass(slots=True)
class _InFlight:
    """A plan on its way: ``output`` is the executor's, ``sampled`` the second half's where the plan has grammar rows."""

    plan: SchedulerOutput
    output: Future[ModelRunnerOutput | None]
    sampled: Future[ModelRunnerOutput] | None


class EngineCore:
    """Boots the parts and steps them. All methods are called from one thread.

    After any failure of executor or scheduler in a step the core is dead: that call and every later one raise
    ``EngineDeadError`` with the root cause, and the executor is shut down.
    """

    def __init__(self, config: EngineConfig, composition: Composition) -> None:
        """Raises ``ConfigError`` for a context that the model does not support, what a worker raised (``WorkerError``), or
        ``EngineStartError`` when there is no room for a KV cache."""
        self.config, self._composition = config, composition
        self._failure: BaseException | str | None = None
        self._live: set[str] = set()
        """Ids of unfinished requests, with the scheduler or waiting for their grammar."""
        self._ended: list[EngineCoreOutput] = []
        """News that the next step tells: requests that ended before the scheduler had them."""
        self._in_flight: deque[_InFlight] = deque()
        check_context(config, composition.spec)
        hook = composition.host.hook
        self.executor: Executor = composition.create("executor")
        ending = Ending(self.executor, composition.host)
        self._stop = weakref.finalize(self, ending)
        try:
            self._lockstep = Lockstep(self.executor)
            specs, reports = self.executor.get_kv_cache_specs(), self.executor.determine_available_memory()
            kv_config = kv_cache_config(config.kv_cache, specs, reports, self._window_limit())
            self.info = ending.info = EngineInfo.of(config, composition.spec, kv_config, seed=self._lockstep.seed(config.seed))
            hook.engine_starting(info=self.info)
            self.executor.initialize_from_config(kv_config)
            ending.sinks = composition.create_all("event_sink")
            sinks = list(ending.sinks.values())
            self.grammars = ending.grammars = self._grammar_manager()
            self.scheduler: Scheduler = composition.create(
                "scheduler", kv_config=kv_config, event_sinks=sinks, grammars=self.grammars, clock=self._lockstep.clock
            )
            self.executor.register_failure_callback(_weakly(self._on_executor_failure))
            hook.engine_ready(info=self.info)
        except BaseException:
            self._let_go()
            raise

    def _window_limit(self) -> int:
        """A sliding window counts if it is shorter than this. For a scheduler that does not know windows none does: it keeps all
        blocks anyway, and need not keep block tables apart."""
        if "windows" not in self._composition.parts["scheduler"].capabilities:
            return 0
        return self.config.max_model_len or self._composition.spec.max_model_len

    def _grammar_manager(self) -> GrammarManager:
        limits = self.config.structured_outputs
        return GrammarManager(
            partial(self._composition.create, "grammar"),
            self._composition.spec.vocab_size,
            num_threads=limits.compile_threads,
            timeout=limits.compile_timeout,
            agree=None if self._lockstep.alone else self._lockstep.outcomes,
        )

    # -- the loop ----------------------------------------------------------------------------------------------------

    def step(self) -> list[EngineCoreOutput]:
        """Plan what can be planned, wait for the oldest step in flight, book its results.

        Returns the news of that step, and of requests that ended before they came to the scheduler. [] when nothing is in flight
        and nothing can be planned; while a grammar is being compiled that takes up to ``GRAMMAR_WAIT`` seconds.
        """
        self._check_alive()
        try:
            self._lockstep.begin_step()
            self._hand_over()
            while len(self._in_flight) < self.executor.max_concurrent_batches and self._submit_next():
                pass
            news, self._ended = self._ended, []
            if self._in_flight:
                step = self._in_flight.popleft()
                news += self.scheduler.update_from_output(step.plan, self._result(step))
            elif not news:
                self.grammars.wait(GRAMMAR_WAIT)
            self._live.difference_update(output.request_id for output in news if output.finish_reason is not None)
            return news
        except Exception as error:
            dead = self._die(error)
            raise dead from dead.__cause__ or error
        except BaseException as interrupt:  # a step cut in the middle leaves parts that do not agree
            self._die(interrupt)
            raise

    def _submit_next(self) -> bool:
        """Send the next plan on its way; False when there is nothing to compute and nothing to tell."""
        plan = self.scheduler.schedule()
        if plan.empty and not plan.has_state_changes:
            return False
        output = self.executor.execute_model(plan, non_block=True)
        grammar = self.scheduler.grammar_output(plan)  # while the forward runs
        sampled = self.executor.sample_tokens(grammar, non_block=True) if plan.grammar_slots else None
        self._in_flight.append(_InFlight(plan, output, sampled))
        return True

    def _result(self, step: _InFlight) -> ModelRunnerOutput:
        timeout = self.config.executor.step_timeout
        try:
            output = step.output.result(timeout)
            if output is None:
                output = (step.sampled or self.executor.sample_tokens(None, non_block=True)).result(timeout)
        except TimeoutError as error:
            if timeout is None:
                raise
            late = f"step {step.plan.step_id} took longer than executor.step_timeout={timeout} s"
            who = self.executor.waits_for()
            raise TimeoutError(f"{late}: no answer from {who}" if who else late) from error
        assert output is not None, "sample_tokens returned nothing"
        return output

    # -- requests ----------------------------------------------------------------------------------------------------

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue ``request``, one with a grammar as soon as that is compiled.

        Raises ``ValueError`` for an id in use, a prompt that can never fit the KV pool, and what the scheduler does not serve. A
        request that is refused only when its grammar is compiled ends with ``FinishReason.ERROR``.
        """
        self._check_alive()
        self._check_served(request)
        if request.request_id in self._live:
            raise ValueError(
                f"request id {request.request_id!r} is still in use; wait for its end, abort it, or choose another id"
            )
        request = self._together(self._lockstep.admit, request)
        if request.grammar is None:
            self.scheduler.add_request(request)
        else:
            self.grammars.enqueue(request)
        self._live.add(request.request_id)
        self._together(self._hand_over)

    def _check_served(self, request: EngineCoreRequest) -> None:
        asked = {"grammars": request.grammar is not None, "prompt_logprobs": request.sampling.prompt_logprobs is not None}
        for capability in (name for name, wanted in asked.items() if wanted):
            scheduler = self._composition.parts["scheduler"]
            if capability not in scheduler.capabilities:
                raise ValueError(
                    f"request {request.request_id!r} needs {capability}, which scheduler {scheduler.name!r} does not serve; "
                    "choose another one (scheduler.name)"
                )
        if request.grammar is not None and "grammar" not in self._composition.parts:
            raise ValueError(
                f"request {request.request_id!r} has a grammar, but no grammar backend is installed; pip install "
                "pegboard-plugins, or name one (structured_outputs.backend)"
            )

    def _hand_over(self) -> None:
        """Give the scheduler the requests whose grammar is compiled by now."""
        for request, error in self.grammars.take_ready():
            if error is None:
                try:
                    self.scheduler.add_request(request)
                    continue
                except ValueError as refused:
                    error = str(refused)
                    self.grammars.forget(request.request_id)
            ended = EngineCoreOutput(request_id=request.request_id, finish_reason=FinishReason.ERROR, stop_reason=error)
            self._ended.append(ended)

    def abort_requests(self, request_ids: Iterable[str] | None) -> list[str]:
        """End requests (None: all) and free what they hold. Unknown ids are ignored. Returns the ids that it ended.

        A scheduler that fails at this has lost its books: the core is dead then.
        """
        self._check_alive()
        ids = None if request_ids is None else list(request_ids)
        self._together(self._lockstep.abort, ids)
        untold = [output.request_id for output in self._ended if ids is None or output.request_id in ids]
        self._ended = [output for output in self._ended if output.request_id not in untold]
        ended = [*untold, *self.grammars.drop(ids)]
        try:
            ended += self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
        except Exception as error:
            dead = self._die(error)
            raise dead from dead.__cause__ or error
        self._live.difference_update(ended)
        return ended

    def has_requests(self) -> bool:
        """True while ``step`` has something to do or to wait for; never for a dead engine."""
        if self._failure is not None:
            return False
        return bool(self._in_flight or self._ended or self.grammars.num_waiting) or self.scheduler.has_requests()

    # -- control -----------------------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """The scheduler's; requests that wait for their grammar count as waiting."""
        self._check_alive()
        stats = self.scheduler.stats()
        stats.num_waiting += self.grammars.num_waiting
        return stats

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks; False, and nothing changed, while requests hold blocks."""
        self._check_alive()
        return self.scheduler.reset_prefix_cache()

    def collective_rpc(
        self,
        method: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        ranks: Ranks = ALL,
    ) -> list[Any]:
        """``Executor.collective_rpc``, waiting for the replies. An error of one call does not end the engine. Workers have heard
        of the end of all requests before an engine without any makes a call."""
        self._check_alive()
        while not self._live and self.has_requests():
            self.step()  # has no news: it sends what workers have not been told, and ends what is still in flight
        try:
            return self.executor.collective_rpc(method, tuple(args), kwargs, timeout=timeout, ranks=ranks)  # type: ignore[no-any-return]
        finally:
            if method == "sleep":  # what blocks held is lost, perhaps on some ranks only
                self.scheduler.reset_prefix_cache()

    def check_health(self) -> None:
        """Return when everything answers; raise ``EngineDeadError`` otherwise."""
        self._check_alive()
        try:
            self.executor.check_health()
        except Exception as error:
            dead = self._die(error)
            raise dead from dead.__cause__ or error

    def shutdown(self) -> None:
        """Stop the workers. Idempotent; also done when the object goes away and when the process ends."""
        self._failure = self._failure or "it was shut down"
        self._stop()

    def __enter__(self) -> EngineCore:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # -- failure -----------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(self._failure)

    def _together(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Of a step that all engines take: one that cannot agree with the others is dead. What callers have done wrong is not."""
        try:
            return function(*arguments)
        except ExecutorFailed as error:
            dead = self._die(error)
            raise dead from dead.__cause__ or error

    def _on_executor_failure(self, cause: BaseException) -> None:
        """From any thread: only remember; the step that waits gets its error from its future."""
        self._failure = self._failure or cause

    def _die(self, error: BaseException) -> EngineDeadError:
        """Remember the root cause (the executor's report comes before its symptoms) and let go of the workers."""
        self._failure = self._failure or error
        self._in_flight.clear()
        self._let_go()
        return EngineDeadError(self._failure)

    def _let_go(self) -> None:
        """Stop after a failure. What fails then too is a symptom, and must not take the place of the cause."""
        try:
            self._stop()
        except Exception:
            log.warning("shutting down after a failure failed too", exc_info=True)


def _weakly(method: Callable[[BaseException], None]) -> Callable[[BaseException], None]:
    """The executor outlives the core, for which the finalizer waits: it must not hold it."""
    reference = weakref.WeakMethod(method)

    def call(cause: BaseException) -> None:
        target = reference()
        if target is not None:
            target(cause)

    return call
