"""The ranks of one engine as its own process sees them: the actors, whatever carries calls to them."""

from __future__ import annotations

import abc
import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar, Final, NoReturn

import ray

from pegboard.contracts.executor import ExecutorFailed, WorkerError
from pegboard.plugins import Composition
from pegboard.wire import World
from pegboard_executor_mp.calls import Calls, Deadline
from pegboard_executor_mp.failure import VERDICT_SECONDS, Failure
from pegboard_executor_mp.fleet import has_ended
from pegboard_executor_ray import apart
from pegboard_executor_ray.crew import Crew
from pegboard_executor_ray.loss import raised_by_ray
from pegboard_executor_ray.options import Options
from pegboard_executor_ray.rank_actor import RankActor
from pegboard_executor_ray.waiting import asking, let_shutdown_end, wait

log = logging.getLogger(__name__)

NODE_VERDICT_SECONDS: Final = 10.0
"""As ``VERDICT_SECONDS``, where a node may be lost with its actors."""
_ASK_SECONDS: Final = 0.5
_MARGIN: Final = 30.0
_SYMPTOMS: Final = ("PeerLost", "CommunicatorError", "CommunicatorTimeout")
"""Errors of a rank that say that another one is gone."""


class RayFleet(abc.ABC):
    """``start`` it, ``stop`` it at whatever point. Holds no reference to the executor, which may be forgotten meanwhile.

    A subclass connects the actors to what carries the calls, and says how that ends.
    """

    actor_class: ClassVar[type[RankActor]]

    def __init__(self, options: Options, world: World, step_timeout: float | None, calls: Calls, failure: Failure) -> None:
        self._owner = os.getpid()
        self._step_timeout = step_timeout
        self._options, self._world, self._calls, self._failure = options, world, calls, failure
        self.hurry = False
        """Give the ranks no time to end by themselves: what they wait for may never come."""
        self._lock = threading.RLock()
        self._stopped = False
        self._ending: threading.Thread | None = None
        self._crew: Crew | None = None

    # -- what carries the calls ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _connect(self, crew: Crew, deadline: Deadline) -> None:
        """Returns when all ranks take calls. Raises ``WorkerError``, ``ExecutorFailed``, ``TimeoutError``."""

    @abc.abstractmethod
    def _wait_no_longer(self) -> None:
        """From any thread, more than once: ``_dismiss``, and whoever makes a call, is to stop waiting for the ranks."""

    @abc.abstractmethod
    def _dismiss(self, crew: Crew) -> None:
        """End the ranks, by ``hurry``, and what carries the calls, in bounded time. Called once."""

    # -- starting ------------------------------------------------------------------------------------------------------

    def start(self, composition: Composition, deadline: Deadline) -> None:
        """Returns when the ranks take calls. Raises what ``Crew`` does, ``ExecutorFailed`` for a rank that ended."""
        atexit.register(self.stop)  # before Ray's own
        try:
            self._start(composition, deadline)
        except (Exception, SystemExit) as error:
            if not raised_by_ray(error):
                raise
            why = f"{type(error).__name__}: {error}"
            raise ExecutorFailed(f"Ray failed while the ranks were starting; was it shut down meanwhile? {why}") from error

    def _start(self, composition: Composition, deadline: Deadline) -> None:
        crew = Crew(composition, self._options, self._world, self._fail_apart, self.actor_class)
        with self._lock:
            self._crew, stopped = crew, self._stopped
        if stopped:
            crew.stop(hurry=True)
            raise ExecutorFailed("the executor was shut down")
        self._connect(crew, deadline)

    # -- while they run ------------------------------------------------------------------------------------------------

    def fail(self, cause: BaseException) -> None:
        """For good: every call ends, whoever wants to know is told, the ranks are stopped."""
        self._failure.happen(cause, self._give_up)

    def _give_up(self, refusal: ExecutorFailed) -> None:
        self._calls.refuse(refusal)
        self._begin_end(hurry=True)

    def _fail_apart(self, cause: BaseException) -> None:
        """In a thread of its own: whoever is told may stop everything, and wait for the thread that has found ``cause``."""
        apart.run("failure", self.fail, cause)

    def _before_error(self, error: WorkerError) -> None:
        """An error of one rank may come of the end of another one: then let that be told first."""
        assert self._crew is not None
        here = self._crew.driver.network
        ended = (has_ended(place.pid) for place in self._crew.places if place.network == here)
        if error.error_type in _SYMPTOMS or any(ended):
            self._failure.wait(VERDICT_SECONDS)

    def _ask(self, question: Callable[[Any], Any]) -> dict[int, Any]:
        """What the ranks say, of those that do so within a moment."""
        assert self._crew is not None
        asked = {question(actor): rank for rank, actor in enumerate(self._crew.actors)}
        if not asked:
            return {}
        said: dict[int, Any] = {}
        try:
            done, _ = wait(list(asked), _ASK_SECONDS)
            for ref in done:
                with asking, contextlib.suppress(ray.exceptions.RayError):
                    said[asked[ref]] = ray.get(ref)
        except (Exception, SystemExit) as error:
            if not raised_by_ray(error):
                raise
            log.debug("the ranks cannot be asked", exc_info=True)
        return said

    def raise_verdict(self, otherwise: str) -> NoReturn:
        """Raise what the executor has failed of, as soon as that is known; ``ExecutorFailed(otherwise)`` if it never is."""
        self._failure.wait(NODE_VERDICT_SECONDS)
        raise ExecutorFailed(f"{self._failure.cause or otherwise}") from self._failure.cause

    # -- the end -------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End everything and leave nothing, in bounded time. Idempotent. In a process forked off this one it does nothing."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.stop)
        hurry = self.hurry or self._failure.cause is not None
        self._failure.close()
        hurry = self._calls.shut_down(self._step_timeout) or hurry
        self._end(hurry)

    def _end(self, hurry: bool) -> None:
        self._begin_end(hurry)
        limit = self._options.shutdown_timeout + _MARGIN
        try:
            if self._ending is not None:
                self._ending.join(limit)
        except BaseException:  # a Ctrl-C must not leave anything
            self._begin_end(hurry=True)
            if self._ending is not None:
                self._ending.join(limit)
            raise

    def _begin_end(self, hurry: bool) -> None:
        with self._lock:
            self.hurry = self.hurry or hurry
            first, self._stopped = not self._stopped, True
            if first:
                self._ending = apart.run("end", self._let_go)
        if self.hurry:
            self._wait_no_longer()

    def _let_go(self) -> None:
        let_shutdown_end()
        if self._crew is not None:
            self._dismiss(self._crew)

    def _kill(self, crew: Crew) -> None:
        """Log the stacks of the ranks that are in a call, and end them all."""
        self.hurry = True
        for rank, stack in self._ask(lambda actor: actor.where.remote()).items():
            if stack:
                log.warning("rank %d is stopped in the middle of a call:\n%s", rank, stack)
        crew.kill()
