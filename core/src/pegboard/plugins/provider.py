"""Provider: the unit of offer. A frozen descriptor; listing it imports neither the part nor what the part needs."""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pegboard.plugins.errors import PluginError


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of part: its hook, its contract and the contract version that this core speaks."""

    name: str
    hook: str
    contract: str
    """``module:class`` of the contract."""
    api: int = 1
    summary: str = ""


KINDS: dict[str, Kind] = {}


def _kind(name: str, hook: str, contract: str, summary: str) -> str:
    KINDS[name] = Kind(name, hook, f"pegboard.contracts.{contract}", 1, summary)
    return name


def import_target(target: str) -> Any:
    """The object named by ``package.module:attribute`` (attribute may be dotted). Raises ``PluginError`` where the text or the
    attribute is wrong, and whatever importing the module raises."""
    module, _, attribute = target.partition(":")
    if not module or not attribute:
        raise PluginError(f"{target!r} is no import path; write 'package.module:attribute'")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise PluginError(f"{target!r}: {getattr(found, '__name__', found)!s} has no attribute {part!r}")
        found = getattr(found, part)
    return found


def accepted_arguments(target: Callable[..., Any], available: dict[str, Any]) -> dict[str, Any]:
    """Those of ``available`` that ``target`` takes by name, so that newer cores may offer more."""
    parameters = inspect.signature(target).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(available)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {k: v for k, v in available.items() if k in named}


@dataclass(frozen=True, kw_only=True)
class Provider:
    """A named part that a plugin offers. Subclasses say of which kind.

    ``target`` is a callable (a class), or an import-free ``"package.module:attribute"``. ``api`` is the contract version it
    implements. ``capabilities`` are checked over the whole composition, as are ``requires``: what this part needs of others,
    as ``"kind.capability"``. ``config`` is the pydantic model (or its import path) of the part's options at
    ``plugins.<plugin name>``. ``plugin`` is filled in by the host: the name of the plugin that offers it.
    """

    kind: ClassVar[str]

    name: str
    target: str | Callable[..., Any]
    api: int = 1
    capabilities: frozenset[str] = frozenset()
    roles: frozenset[str] = frozenset()
    config: Any = None
    summary: str = ""
    requires: frozenset[str] = frozenset()
    plugin: str = ""

    def __post_init__(self) -> None:
        for name in ("capabilities", "roles", "requires"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise PluginError(f"{type(self).__name__}({self.name!r}): {name} must be a set of strings, got {value!r}")
            object.__setattr__(self, name, frozenset(value))
        for need in self.requires:
            if not (isinstance(need, str) and all(need.partition("."))):
                raise PluginError(f"{type(self).__name__}({self.name!r}): requires holds {need!r}; write 'kind.capability'")

    def load(self) -> Callable[..., Any]:
        """The class or factory behind ``target``. Raises whatever importing it raises."""
        return import_target(self.target) if isinstance(self.target, str) else self.target


@dataclass(frozen=True, kw_only=True)
class ExecutorProvider(Provider):
    """Capabilities: tp, pp, async_steps, multi_node, ray, external_launch."""

    kind = _kind("executor", "executors", "executor:Executor", "where workers live and how calls reach them")


@dataclass(frozen=True, kw_only=True)
class WorkerProvider(Provider):
    kind = _kind("worker", "workers", "worker:Worker", "one device")


@dataclass(frozen=True, kw_only=True)
class WorkerExtensionProvider(Provider):
    kind = _kind("worker_extension", "worker_extensions", "worker:WorkerExtension", "rides along with a worker")


@dataclass(frozen=True, kw_only=True)
class AttentionBackendProvider(Provider):
    """``priority``: among backends that support a query, "auto" takes the highest."""

    kind = _kind("attention", "attention_backends", "attention:AttentionBackend", "paged attention kernels")
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class GraphRunnerProvider(Provider):
    kind = _kind("graph_runner", "graph_runners", "graph_runner:GraphRunner", "replays captured forwards")


@dataclass(frozen=True, kw_only=True)
class SchedulerProvider(Provider):
    """Capabilities: async_steps, grammars, prompt_logprobs, windows."""

    kind = _kind("scheduler", "schedulers", "scheduler:Scheduler", "the whole scheduler")


@dataclass(frozen=True, kw_only=True)
class RequestQueueProvider(Provider):
    kind = _kind("request_queue", "request_queues", "request_queue:RequestQueue", "order of admission")


@dataclass(frozen=True, kw_only=True)
class AdmissionPolicyProvider(Provider):
    kind = _kind("admission_policy", "admission_policies", "admission_policy:AdmissionPolicy", "may the next request start")


@dataclass(frozen=True, kw_only=True)
class ChunkPolicyProvider(Provider):
    kind = _kind("chunk_policy", "chunk_policies", "chunk_policy:ChunkPolicy", "tokens of a long prefill per step")


@dataclass(frozen=True, kw_only=True)
class PreemptionPolicyProvider(Provider):
    kind = _kind("preemption_policy", "preemption_policies", "preemption_policy:PreemptionPolicy", "who gives up KV blocks")


@dataclass(frozen=True, kw_only=True)
class KVAllocatorProvider(Provider):
    """Capabilities: prefix_caching."""

    kind = _kind("kv_allocator", "kv_allocators", "kv_allocator:KVAllocator", "KV-cache block bookkeeping")


@dataclass(frozen=True, kw_only=True)
class CommunicatorProvider(Provider):
    """``devices``: device types that it serves. ``one_host``: all ranks must be on one host. ``priority``: among those that can
    serve an engine, "auto" takes the highest."""

    kind = _kind("communicator", "communicators", "communicator:Communicator", "collectives among ranks")
    devices: tuple[str, ...] = ("cpu",)
    one_host: bool = False
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class PlatformProvider(Provider):
    """``priority``: among available platforms, "auto" takes the highest."""

    kind = _kind("platform", "platforms", "platform:Platform", "device families")
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelProvider(Provider):
    """``architectures``: names in a checkpoint's ``architectures``. ``spec``: import-free path of a function
    ``(source: ModelSource) -> ModelSpec`` that needs no torch.

    ``accepts``: for a provider that can run architectures which it does not list, the import-free path of a function
    ``(source: ModelSource, config: EngineConfig) -> Iterable[str]`` that says why it cannot run this checkpoint, nothing if it
    can. It is asked where no provider lists the architecture, or if the configuration names it.

    Capabilities: tp (ranks may share a layer), pp (stages may share the layers). ``parallel`` and ``stages``: import-free paths
    of functions ``(spec: ModelSpec, ranks: int) -> Iterable[str]`` that need no torch and say what keeps so many ranks from
    sharing a layer, or so many stages from sharing the layers; nothing if they can. Without ``parallel``,
    ``pegboard.plugins.parallel.undivided_heads`` decides."""

    kind = _kind("model", "models", "model:Model", "architectures")
    architectures: tuple[str, ...] = ()
    spec: str = ""
    accepts: str = ""
    parallel: str = ""
    stages: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.architectures, str) or not isinstance(self.architectures, Iterable):
            raise PluginError(f"ModelProvider({self.name!r}): architectures must be a list of names, got {self.architectures!r}")
        object.__setattr__(self, "architectures", tuple(self.architectures))


@dataclass(frozen=True, kw_only=True)
class WeightLoaderProvider(Provider):
    kind = _kind("weight_loader", "weight_loaders", "weight_loader:WeightLoader", "weight file formats")


@dataclass(frozen=True, kw_only=True)
class TokenizerProvider(Provider):
    kind = _kind("tokenizer", "tokenizers", "tokenizer:Tokenizer", "text to ids, and chat templates")


@dataclass(frozen=True, kw_only=True)
class SamplerProvider(Provider):
    kind = _kind("sampler", "samplers", "sampler:Sampler", "from logits to tokens")


@dataclass(frozen=True, kw_only=True)
class LogitsProcessorProvider(Provider):
    kind = _kind("logits_processor", "logits_processors", "logits_processor:LogitsProcessor", "changes logits before the choice")


@dataclass(frozen=True, kw_only=True)
class GrammarProvider(Provider):
    """``priority``: "auto" takes the highest."""

    kind = _kind("grammar", "grammars", "grammar:GrammarBackend", "constrains answers to a language")
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class EventSinkProvider(Provider):
    kind = _kind("event_sink", "event_sinks", "event_sink:EventSink", "is told what happens to requests")


@dataclass(frozen=True, kw_only=True)
class StatLoggerProvider(Provider):
    kind = _kind("stat_logger", "stat_loggers", "stat_logger:StatLogger", "gets gauges and counters")


@dataclass(frozen=True)
class ConfigSection:
    """Typed options of a plugin at ``plugins.<name>``: a pydantic model, or its import path."""

    name: str
    model: Any
    summary: str = ""


@dataclass(frozen=True)
class RequestFields:
    """Typed fields that a request may carry for the plugin ``name``, at ``ext[name]``: a pydantic model, or its import path."""

    name: str
    model: Any
    summary: str = ""


@dataclass(frozen=True)
class CliCommand:
    """A command of ``pegboard``: ``add_arguments`` gets its argparse parser, ``run`` the parsed arguments and returns the exit
    code (None: 0)."""

    name: str
    run: Callable[[argparse.Namespace], int | None]
    summary: str = ""
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration: where, what, and what to do about it."""

    where: str
    message: str
    remedy: str = ""
    sources: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" + (f" ({self.remedy})" if self.remedy else "")
