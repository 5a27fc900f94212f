"""Executor: hides where workers live and how calls reach them."""

from __future__ import annotations

import abc
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from pegboard.contracts.worker import check_method
from pegboard.wire import GrammarOutput, KVCacheConfig, KVCacheSpec, MemoryReport, SchedulerOutput, World

if TYPE_CHECKING:
    from pegboard.config import EngineConfig
    from pegboard.plugins import Composition

API: Final = 1

Ranks = Literal["all"] | Sequence[int]
ALL: Final = "all"
MAX_MESSAGE: Final = 4096
"""Characters of a worker's error message that reach the caller; the middle of a longer one is left out."""
MAX_TRACEBACK: Final = 16384

HEALTH_SECONDS: Final = 60.0
"""How long ``check_health`` of several ranks waits where ``executor.step_timeout`` says nothing."""

_SHUTDOWN = threading.RLock()
"""Guards the flags ``_is_shut_down``, never held while workers are stopped."""


class WorkerError(RuntimeError):
    """A worker failed. ``rank``, the original ``error_type`` and ``message``, and the remote ``traceback_text`` (also a note)."""

    def __init__(self, rank: int, error_type: str, message: str, traceback_text: str = "") -> None:
        super().__init__(f"worker rank {rank} failed: {error_type}: {message}")
        self.rank, self.error_type, self.message, self.traceback_text = rank, error_type, message, traceback_text
        if traceback_text:
            self.add_note(f"in worker rank {rank}:\n{traceback_text}")

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerError, (self.rank, self.error_type, self.message, self.traceback_text)

    @classmethod
    def of(cls, rank: int, error: BaseException) -> WorkerError:
        """What can be told of ``error`` in any process: text only, shortened, whatever the exception's class holds or lacks."""
        try:
            message = str(error)
        except Exception:
            message = "(its text cannot be made)"
        text = "".join(traceback.format_exception(error))
        return cls(rank, type(error).__name__, _shorten(message, MAX_MESSAGE), _shorten(text, MAX_TRACEBACK))


class ExecutorFailed(RuntimeError):
    """The executor has failed or was shut down; no call can succeed any more."""


class Executor(abc.ABC):
    """Starts the workers of one engine and carries calls to them.

    An implementation supplies ``_init_executor``, ``collective_rpc``, ``check_health``, ``register_failure_callback`` and
    ``_shutdown``; everything else is written here on top of ``collective_rpc``.

    Invariants:

    - Replies come in rank order, or in the order of ``ranks`` when given. One reply per rank asked.
    - Every call gets its own reply. After a time-out the late reply is dropped, never handed to the next call.
    - An exception on *any* rank completes the call with ``WorkerError``, also if only one rank was to answer, and the
      executor stays usable unless the worker is gone.
    - Failure callbacks run exactly once each, also when registered after the failure.
    - ``shutdown`` is idempotent and may be called from any thread, also during a step; calls in flight then end with
      ``ExecutorFailed``.
    - Steps complete in the order in which they were submitted.
    """

    uses_ray: ClassVar[bool] = False
    supports_pp: ClassVar[bool] = False
    supports_async_scheduling: ClassVar[bool] = False

    def __init__(self, config: EngineConfig, composition: Composition) -> None:
        """Start the workers and run their device and model phases. Raises what a worker raised, as ``WorkerError``."""
        self.config = config
        self.composition = composition
        self.world = World(tp_size=config.executor.tensor_parallel_size, pp_size=config.executor.pipeline_parallel_size)
        self._init_executor()

    @staticmethod
    def get_class(config: EngineConfig) -> type[Executor]:
        """The executor class that ``config`` selects (``executor.name``, or ``select_executor`` for "auto")."""
        from pegboard.plugins import executor_class  # the one upward call of this package, kept out of import time

        return executor_class(config)

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be in flight at once: pipeline stages, for an executor that overlaps them."""
        return self.world.pp_size

    @property
    def num_engines(self) -> int:
        """Engines that share the ranks, and take every step together: one, or one per rank where a launcher starts the ranks."""
        return 1

    def gather(self, what: str, value: Any) -> list[Any]:
        """What the engines say, in the order of ranks. All of them call it at the same point, which ``what`` describes in words.

        ``value``: small, picklable. Raises ``ExecutorFailed`` where another engine is at another point, or gone.
        """
        return [value]

    # -- to be implemented -------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _init_executor(self) -> None:
        """Start workers; on each run ``init_device`` and ``load_model``."""

    @abc.abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        non_block: bool = False,
        ranks: Ranks = ALL,
    ) -> Any:
        """Call ``method`` with the same arguments on every rank (or the named ones).

        ``method`` is the name of a declared worker method (``pegboard.contracts.worker.rpc``; ``namespace.method`` for an
        extension's) or a callable that gets the worker as its first argument.

        Returns the list of replies in rank order; with ``non_block`` a ``concurrent.futures.Future`` of it, whose
        ``result(timeout)`` works in any order.

        Raises:
            AttributeError: ``method`` is no declared worker method; the message lists near names.
            TimeoutError: no complete answer within ``timeout`` seconds.
            WorkerError: a rank raised.
            ExecutorFailed: the executor is gone.
        """

    @abc.abstractmethod
    def check_health(self) -> None:
        """Return when every worker answers; raise ``ExecutorFailed`` or ``WorkerError`` otherwise."""

    def waits_for(self) -> str:
        """Who owes an answer to the oldest call under way, for messages ("rank 1"); "" where that is not known."""
        return ""

    @abc.abstractmethod
    def register_failure_callback(self, callback: Callable[[BaseException], None]) -> None:
        """Have ``callback(cause)`` called once when the executor fails for good; at once if it already has."""

    @abc.abstractmethod
    def _shutdown(self) -> None:
        """Stop the workers and release what they held. Called at most once, by ``shutdown``."""

    # -- written once ------------------------------------------------------------------------------------------------

    _is_shut_down = False

    def shutdown(self) -> None:
        with _SHUTDOWN:
            first, self._is_shut_down = not self._is_shut_down, True
        if first:
            self._shutdown()

    def execute_model(self, plan: SchedulerOutput, non_block: bool = False) -> Any:
        """First half of a step: apply the deltas, run the forward and, unless ``plan.grammar_slots``, sample.

        Returns the output rank's ``ModelRunnerOutput``, or None when ``sample_tokens`` must follow; a ``Future`` of it with
        ``non_block``.
        """
        return self._step("execute_model", plan, non_block)

    def sample_tokens(self, grammar: GrammarOutput | None, non_block: bool = False) -> Any:
        """Second half: mask with ``grammar`` and sample. Same returns as ``execute_model``, never None."""
        return self._step("sample_tokens", grammar, non_block)

    def _asked(self, ranks: Ranks) -> Sequence[int]:
        """The ranks that a call is for, in the order of its replies. Raises ``ValueError``."""
        size = self.world.size
        if ranks == ALL:
            return range(size)
        asked = tuple(int(rank) for rank in ranks)
        if any(not 0 <= rank < size for rank in asked) or len(set(asked)) < len(asked):
            raise ValueError(f"ranks={ranks!r}: this executor has the ranks 0 to {size - 1}, and each can be asked once")
        return asked

    def _step(self, method: str, argument: Any, non_block: bool) -> Any:
        replies = self.collective_rpc(method, (argument,), non_block=non_block)
        pick = self.world.output_rank
        return _map_future(replies, lambda r: r[pick]) if non_block else replies[pick]

    def determine_available_memory(self) -> list[MemoryReport]:
        """Third boot phase on every worker."""
        return self._boot_phase("determine_available_memory")

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Per worker: attention layer name to what it stores."""
        return self._boot_phase("get_kv_cache_specs")

    def initialize_from_config(self, kv_config: KVCacheConfig) -> None:
        """Fourth and fifth boot phases: allocate the KV cache, then compile or warm up."""
        self._boot_phase("initialize_cache", (kv_config,))
        self._boot_phase("compile_or_warm_up")

    def _boot_phase(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """An executor that limits how long the phases of a start may take does so here."""
        return self.collective_rpc(method, args)  # type: ignore[no-any-return]

    def sleep(self, level: int = 1) -> None:
        self.collective_rpc("sleep", (level,))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self.collective_rpc("wake_up", (None if tags is None else list(tags),))

    def profile(self, start: bool) -> None:
        self.collective_rpc("profile", (start,))

    def add_lora(self, name: str, path: str) -> None:
        self.collective_rpc("add_lora", (name, path))

    def remove_lora(self, name: str) -> None:
        self.collective_rpc("remove_lora", (name,))

    def list_loras(self) -> list[str]:
        return self.collective_rpc("list_loras")[0]  # type: ignore[no-any-return]


def _shorten(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"


def _map_future(future: Future[Any], pick: Callable[[Any], Any]) -> Future[Any]:
    mapped: Future[Any] = Future()

    def done(source: Future[Any]) -> None:
        if not mapped.set_running_or_notify_cancel():
            return
        try:
            result = pick(source.result())
        except BaseException as error:  # whatever it is, whoever waits must get it: also a cancelled call, or too few replies
            mapped.set_exception(error)
        else:
            mapped.set_result(result)

    future.add_done_callback(done)
    return mapped


__all__ = ["ALL", "API", "Executor", "ExecutorFailed", "Ranks", "WorkerError", "check_method"]
