"""Worker: one device. A typed set of methods that executors call by name, in groups."""

from __future__ import annotations

import abc
import difflib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pegboard.wire import GrammarOutput, KVCacheConfig, KVCacheSpec, MemoryReport, ModelRunnerOutput, SchedulerOutput, World

if TYPE_CHECKING:
    from pegboard.config import EngineConfig
    from pegboard.plugins import Composition

API: Final = 1
F = TypeVar("F", bound=Callable[..., Any])


def rpc(group: str) -> Callable[[F], F]:
    """Declare a worker method as callable through ``Executor.collective_rpc``."""

    def mark(method: F) -> F:
        method.__pegboard_rpc__ = group  # type: ignore[attr-defined]
        return method

    return mark


def declared_methods(worker_class: type) -> dict[str, str]:
    """Declared RPC methods of a worker class: name to group. An override of a declared method stays declared."""
    found: dict[str, str] = {}
    for base in reversed(worker_class.__mro__):
        for name, value in vars(base).items():
            group = getattr(value, "__pegboard_rpc__", None)
            if group is not None:
                found[name] = group
    return found


def check_method(worker_class: type, method: str, extensions: Mapping[str, WorkerExtension] | None = None) -> None:
    """Raise ``AttributeError`` unless ``method`` is declared by the worker or, as ``namespace.method``, by an extension."""
    known = list(declared_methods(worker_class))
    for name, extension in (extensions or {}).items():
        known += [f"{name}.{m}" for m in declared_methods(type(extension))]
    if method not in known:
        near = difflib.get_close_matches(method, known, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; declared are {', '.join(sorted(known))}"
        raise AttributeError(f"{method!r} is not a declared worker method{hint}")


def resolve_method(worker: Worker, method: str) -> Callable[..., Any]:
    """The bound method that ``collective_rpc`` means by ``method``: the worker's own, or ``<extension>.<method>``.

    Raises ``AttributeError`` like ``check_method``.
    """
    extensions = getattr(worker, "extensions", {})
    check_method(type(worker), method, extensions)
    namespace, _, name = method.rpartition(".")
    return getattr(extensions[namespace] if namespace else worker, name)  # type: ignore[no-any-return]


class Worker(abc.ABC):
    """One device, one rank. Boots in six phases, each a method, called once and in this order:

    1. ``init_device``: device, threads, communication;
    2. ``load_model``: weights in place, checked, post-processed;
    3. ``determine_available_memory``: a dummy step of ``max_num_batched_tokens`` tokens spread over ``max_num_seqs``
       sequences (the remainder to the first), then a report;
    4. ``initialize_cache``: allocate the KV cache;
    5. ``compile_or_warm_up``: compile, capture graphs, warm up;
    6. the first ``execute_model``: ready.

    Invariants: methods are called from one thread, one at a time. The worker's resident batch changes only by the
    plans it is given, in the order of ``pegboard.wire.scheduler_output``. After an exception in a step the engine
    fails; a worker need not recover.

    Several ranks: all get the same calls, in the same order. Without pipeline stages every rank samples, and gets the same
    tokens, as the logits are equal bit by bit and draws depend on seed, position and id alone; each keeps its own. With stages
    the last one samples, and all get known tokens in later plans. The other stages then return a ``ModelRunnerOutput``
    without tokens, from ``sample_tokens`` as well.
    """

    def __init__(self, config: EngineConfig, composition: Composition, world: World) -> None:
        self.config, self.composition, self.world = config, composition, world
        self.extensions: dict[str, WorkerExtension] = {}

    # lifecycle ------------------------------------------------------------------------------------------------------

    @rpc("lifecycle")
    @abc.abstractmethod
    def init_device(self) -> None: ...

    @rpc("lifecycle")
    @abc.abstractmethod
    def load_model(self) -> None: ...

    @rpc("lifecycle")
    @abc.abstractmethod
    def compile_or_warm_up(self) -> None: ...

    @rpc("lifecycle")
    def check_health(self) -> None:
        """Return if the device answers; raise otherwise."""

    @rpc("lifecycle")
    def shutdown(self) -> None:
        """Release the device. Idempotent."""

    # memory ---------------------------------------------------------------------------------------------------------

    @rpc("memory")
    @abc.abstractmethod
    def determine_available_memory(self) -> MemoryReport: ...

    @rpc("memory")
    @abc.abstractmethod
    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]: ...

    @rpc("memory")
    @abc.abstractmethod
    def initialize_cache(self, kv_config: KVCacheConfig) -> None: ...

    # step -----------------------------------------------------------------------------------------------------------

    @rpc("step")
    @abc.abstractmethod
    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Apply ``plan``, run the forward and sample; None when ``plan.grammar_slots`` asks for ``sample_tokens``."""

    @rpc("step")
    @abc.abstractmethod
    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput: ...

    # optional groups: a worker without them says so -------------------------------------------------------------------

    @rpc("sleep")
    def sleep(self, level: int) -> None:
        raise self._lacks("sleep")

    @rpc("sleep")
    def wake_up(self, tags: list[str] | None) -> None:
        raise self._lacks("wake_up")

    @rpc("profile")
    def profile(self, start: bool) -> None:
        raise self._lacks("profile")

    @rpc("lora")
    def add_lora(self, name: str, path: str) -> None:
        raise self._lacks("add_lora")

    @rpc("lora")
    def remove_lora(self, name: str) -> None:
        raise self._lacks("remove_lora")

    @rpc("lora")
    def list_loras(self) -> list[str]:
        return []

    def _lacks(self, method: str) -> RuntimeError:
        return RuntimeError(f"{type(self).__module__}.{type(self).__qualname__} does not offer {method}")


class WorkerExtension:
    """Rides along with a worker: many per engine, called in the order of ``plugins.enabled``.

    Methods marked with ``rpc`` become ``<extension name>.<method>`` for ``collective_rpc``. The observing methods must
    not change what they are given; what they raise fails the step.
    """

    capturable: bool = True
    """False for an extension that looks inside of ``forward``, by hooks on a model's modules for instance: a replayed graph would
    pass it by, so there are none while it is on."""

    def on_model_loaded(self, model: Any) -> None:
        """After ``load_model``, before memory is measured and graphs are captured; and after ``wake_up`` has made the model anew,
        for which nobody may hold the old one."""

    def on_memory_profile(self) -> int:
        """Bytes that the extension will hold; taken from what the KV cache would get."""
        return 0

    def before_forward(self, plan: SchedulerOutput) -> None: ...

    def after_forward(self, plan: SchedulerOutput, hidden: Any) -> None:
        """``hidden``: what the model's ``forward`` returned, on pipeline stages but the last a mapping of tensors. The next step
        may overwrite it."""

    def after_sample(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """On the last pipeline stage, where there are results."""


__all__ = ["API", "Worker", "WorkerExtension", "check_method", "declared_methods", "resolve_method", "rpc"]
