"""Choosing the parts of an engine: by name, or for "auto" by the select hooks and then by a stated default."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pegboard.plugins.checks import load_target
from pegboard.plugins.chosen import Chosen
from pegboard.plugins.errors import PluginError
from pegboard.plugins.provider import CommunicatorProvider, GrammarProvider, PlatformProvider, Provider
from pegboard.plugins.suggestions import CAPABILITY_PACKAGES

if TYPE_CHECKING:
    from pegboard.config import EngineConfig
    from pegboard.plugins.host import PluginHost

logger = logging.getLogger(__name__)

NAMED_PARTS: Final = (
    ("model_impl", "model"),
    ("executor.name", "executor"),
    ("executor.worker", "worker"),
    ("executor.communicator", "communicator"),
    ("scheduler.name", "scheduler"),
    ("scheduler.queue", "request_queue"),
    ("scheduler.admission", "admission_policy"),
    ("scheduler.chunking", "chunk_policy"),
    ("scheduler.preemption", "preemption_policy"),
    ("kv_cache.allocator", "kv_allocator"),
    ("device", "platform"),
    ("load_format", "weight_loader"),
    ("sampling.sampler", "sampler"),
    ("sampling.logits_processors", "logits_processor"),
    ("structured_outputs.backend", "grammar"),
    ("attention.backend", "attention"),
    ("compilation.graph_runner", "graph_runner"),
    ("observability.event_sinks", "event_sink"),
    ("observability.stat_loggers", "stat_logger"),
)
"""Where the configuration names parts, and of which kind."""

AUTO: Final = "auto"
SELECTED: Final = {
    "scheduler": ("select_scheduler", "default"),
    "preemption_policy": ("select_preemption_policy", "recompute"),
    "kv_allocator": ("select_kv_allocator", "prefix"),
}
"""Kind to the hook that may settle "auto", and the name that it means otherwise."""


@dataclass(slots=True)
class Choices:
    """What has been chosen, why, and every problem on the way."""

    host: PluginHost
    config: EngineConfig
    parts: dict[str, Provider] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    problems: list[Exception] = field(default_factory=list)

    def attempt(self, choose: Callable[[], tuple[Provider, str]]) -> Provider | None:
        """Note a choice; keep a problem for later, so that all are told together."""
        try:
            provider, reason = choose()
        except (PluginError, ValueError) as error:
            self.problems.append(error)
            return None
        self.parts[provider.kind], self.reasons[provider.kind] = provider, reason
        return provider

    def named(self, path: str, kind: str, name: str) -> tuple[Provider, str]:
        """The provider that the configuration names at ``path``. The error says where."""
        try:
            return self.host.get(kind, name), f"{path} = {name!r}"
        except PluginError as error:
            error.args = (f"{path}: {error}",)
            raise

    def check_name(self, path: str, kind: str, name: str) -> None:
        """Tell a name that means nothing, without choosing."""
        try:
            self.named(path, kind, name)
        except PluginError as error:
            self.problems.append(error)

    def selected(self, path: str, kind: str, name: str) -> tuple[Provider, str]:
        """As named; for "auto" the hook's answer, then the default."""
        if name != AUTO or kind not in SELECTED:
            return self.named(path, kind, name)
        hook, default = SELECTED[kind]
        return self.from_hook(hook, kind) or self._default(path, kind, default)

    def _default(self, path: str, kind: str, default: str) -> tuple[Provider, str]:
        provider, _ = self.named(path, kind, default)
        return provider, f"the default for {path} = {AUTO!r}"

    def from_hook(self, hook: str, kind: str) -> tuple[Provider, str] | None:
        """What the plugins that have a say choose; None when all abstain."""
        name = ask(self.host, hook, config=self.config, candidates=self.host.providers(kind))
        if name is None:
            return None
        return self.host.get(kind, name), why_chosen(self.host, hook, name)


def why_chosen(host: PluginHost, hook: str, name: str) -> str:
    """The reason for ``name``, the answer of a select hook: the one that a plugin gives, and in any case who was asked."""
    who = f"chosen by {hook} of {' or '.join(host.hook.implemented_by(hook))}"
    return f"{name.reason}; {who}" if isinstance(name, Chosen) else who


def ask(host: PluginHost, hook: str, **arguments: Any) -> str | None:
    """Call a select hook. An answer that is no candidate, and an exception, are errors that name the plugins asked."""
    asked = host.hook.implemented_by(hook)
    if not asked:
        return None
    try:
        name = getattr(host.hook, hook)(**arguments)
    except Exception as error:
        raise PluginError(f"{hook} failed in {' or '.join(asked)}: {type(error).__name__}: {error}") from error
    if name is not None and name not in arguments["candidates"]:
        known = ", ".join(map(repr, arguments["candidates"])) or "none"
        raise PluginError(f"{hook} of {' or '.join(asked)} chose {name!r}, which is no candidate; candidates: {known}")
    return name  # type: ignore[no-any-return]


def choose_executor(choices: Choices) -> tuple[Provider, str]:
    """As named; for "auto" what ``select_executor`` says, then uniproc for one rank, else one that can run several."""
    settings, host = choices.config.executor, choices.host
    if settings.name != AUTO:
        return choices.named("executor.name", "executor", settings.name)
    chosen = choices.from_hook("select_executor", "executor")
    if chosen is not None:
        return chosen
    sizes = {"tp": settings.tensor_parallel_size, "pp": settings.pipeline_parallel_size}
    needed = sorted(c for c, size in sizes.items() if size > 1)
    if not needed:
        provider, _ = choices.named("executor.name", "executor", "uniproc")
        return provider, "one rank"
    ranks = f"{sizes['tp']} x {sizes['pp']} ranks (executor.tensor_parallel_size x executor.pipeline_parallel_size)"
    offered = host.automatic("executor").items()
    able = {n: p for n, p in offered if p.capabilities.issuperset(needed) and "external_launch" not in p.capabilities}
    if able:
        name = "mp" if "mp" in able else min(able)
        return able[name], f"{ranks} need {' and '.join(needed)}"
    others = [n for n, p in host.providers("executor").items() if p.capabilities.issuperset(needed)]
    hint = f"; installed but not enabled: {', '.join(others)} (name one as executor.name)" if others else ""
    package = CAPABILITY_PACKAGES[("executor", needed[0])]
    raise PluginError(
        f"executor: {ranks} need an executor with {' and '.join(needed)}, and none is installed; pip install {package}{hint}"
    )


def choose_platform(choices: Choices) -> tuple[Provider, str]:
    """As named, if available; for "auto" the available one with the highest priority. A named one is taken as it is where the
    executor may have workers on other machines, which are what counts and are not known yet."""
    name, host = choices.config.device, choices.host
    if name != AUTO:
        provider, reason = choices.named("device", "platform", name)
        executor = choices.parts.get("executor")
        if executor is not None and "multi_node" in executor.capabilities:
            return provider, reason
        if not _available(load_target(provider, host), host.label(provider)):
            raise PluginError(f"device: platform {name!r} of {host.label(provider)} is not available on this machine")
        return provider, reason
    skipped: list[str] = []
    available: list[tuple[str, PlatformProvider]] = []
    for key, provider in host.automatic("platform").items():
        assert isinstance(provider, PlatformProvider)
        try:
            if _available(load_target(provider, host), host.label(provider)):
                available.append((key, provider))
            else:
                skipped.append(f"{key} is not available")
        except PluginError as error:
            logger.warning("device: platform %r is skipped: %s", key, error)
            skipped.append(f"{key} failed: {error}")
    if not available:
        raise PluginError(f"device: no platform is available ({'; '.join(skipped) or 'none is installed'})")
    highest = max(p.priority for _, p in available)
    best = [(key, p) for key, p in available if p.priority == highest]
    if len(best) > 1:
        who = " and ".join(f"{key!r} of {host.label(p)}" for key, p in best)
        raise PluginError(
            f"device: {who} are both available with priority {highest}; set device to one of them, or block one in plugins.block"
        )
    reason = f"available, priority {highest}" + (f"; {'; '.join(skipped)}" if skipped else "")
    return best[0][1], reason


def choose_communicator(choices: Choices) -> None:
    """Several ranks only. As named; for "auto" the one with the highest priority that serves the device, which comes first."""
    settings, host = choices.config.executor, choices.host
    if settings.tensor_parallel_size * settings.pipeline_parallel_size == 1:
        if settings.communicator != AUTO:
            choices.check_name("executor.communicator", "communicator", settings.communicator)
        return
    if settings.communicator != AUTO:
        choices.attempt(lambda: choices.named("executor.communicator", "communicator", settings.communicator))
        return
    device = choices.parts["platform"].name if "platform" in choices.parts else ""
    best = best_communicator(host, device)
    if best is not None:
        choices.attempt(lambda: (best, f"priority {best.priority} on {device}"))
    elif device:
        known = ", ".join(sorted(host.providers("communicator"))) or "none"
        choices.problems.append(
            PluginError(f"executor.communicator: none serves ranks on {device!r}; installed are {known}; name one that does")
        )


def best_communicator(host: PluginHost, device: str, *, one_host: bool = True) -> CommunicatorProvider | None:
    """The one with the highest priority that serves ``device``, and where ``one_host`` is false ranks on several hosts."""
    able = {
        key: p
        for key, p in host.automatic("communicator").items()
        if isinstance(p, CommunicatorProvider) and device in p.devices and (one_host or not p.one_host)
    }
    return able[max(able, key=lambda key: (able[key].priority, key))] if able else None


def choose_grammar(choices: Choices) -> None:
    """As named; for "auto" the usable one with the highest priority. Without any, requests that need one are refused."""
    path, host = "structured_outputs.backend", choices.host
    name = choices.config.structured_outputs.backend
    if name != AUTO:
        choices.attempt(lambda: choices.named(path, "grammar", name))
        return
    offered = {key: p for key, p in host.automatic("grammar").items() if isinstance(p, GrammarProvider)}
    if offered:
        best = max(offered, key=lambda key: (offered[key].priority, key))
        choices.attempt(lambda: (offered[best], f"priority {offered[best].priority}"))


def _available(platform: Any, label: str) -> bool:
    try:
        return bool(platform.is_available())
    except Exception as error:
        raise PluginError(f"is_available of {label} raised {type(error).__name__}: {error}") from error
