"""Composition: the parts of one engine, chosen and checked. ``compose`` makes it from a configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from pegboard.contracts.model import ModelSpec
from pegboard.contracts.model_source import ModelSource
from pegboard.plugins.attention import backend_names
from pegboard.plugins.checks import capability_problems, check_made, load_target
from pegboard.plugins.errors import CompositionError, PluginError
from pegboard.plugins.host import PluginHost
from pegboard.plugins.manifest import PluginManifest
from pegboard.plugins.models import choose_model, resolve, spec_of
from pegboard.plugins.options import section_of
from pegboard.plugins.parallel import parallel_problems
from pegboard.plugins.parts import (
    AUTO,
    NAMED_PARTS,
    Choices,
    best_communicator,
    choose_communicator,
    choose_executor,
    choose_grammar,
    choose_platform,
)
from pegboard.plugins.provider import Provider, accepted_arguments

if TYPE_CHECKING:
    from pegboard.config import EngineConfig
    from pegboard.contracts.executor import Executor

logger = logging.getLogger(__name__)

LISTED = (
    ("event_sink", "observability.event_sinks"),
    ("stat_logger", "observability.stat_loggers"),
    ("logits_processor", "sampling.logits_processors"),
)
"""Kinds of which the configuration lists those that are on."""
RIDING_ALONG = ("event_sink", "stat_logger", "worker_extension")
"""Kinds that only look on: they are also on for the plugins in ``plugins.enabled``."""


@dataclass(frozen=True, eq=False)
class Composition:
    """Frozen. Pickled as its configuration, its choices and the manifest of its plugins; the other process loads the same
    plugins or refuses."""

    config: EngineConfig
    host: PluginHost
    source: ModelSource
    spec: ModelSpec
    parts: Mapping[str, Provider]
    """Kind to the chosen provider. Attention is chosen in the worker, see ``select_attention``."""
    reasons: Mapping[str, str]
    """Kind to why it was chosen."""
    extensions: Mapping[str, tuple[Provider, ...]] = field(default_factory=dict)
    """``event_sink``, ``stat_logger``, ``logits_processor`` and ``worker_extension`` to those that are on, in order."""

    @cached_property
    def manifest(self) -> PluginManifest:
        """The plugins of this engine, with their options."""
        return self.host.manifest(self.config.plugins.sections)

    def create(self, kind: str, **available: Any) -> Any:
        """Make the part that was chosen for ``kind``.

        Its constructor gets, by name, what it accepts of ``config``, ``composition``, ``source``, ``spec``, ``options`` and what
        is ``available``.
        """
        if kind not in self.parts:
            raise PluginError(f"no {kind} was chosen; chosen kinds are {', '.join(sorted(self.parts))}")
        return self.make(self.parts[kind], **available)

    def create_all(self, kind: str, **available: Any) -> dict[str, Any]:
        """Make every part of a kind of which several may be on: provider name (``plugin:name`` where two have one name) to
        part, in order."""
        providers = self.extensions.get(kind, ())
        names = [p.name for p in providers]
        unique = [p.name if names.count(p.name) == 1 else f"{p.plugin}:{p.name}" for p in providers]
        return {name: self.make(provider, **available) for name, provider in zip(unique, providers, strict=True)}

    def make(self, provider: Provider, **available: Any) -> Any:
        """Make one part from its provider. ``PluginError`` when it cannot be loaded or does not keep its contract."""
        target = load_target(provider, self.host)
        offered = {
            "config": self.config,
            "composition": self,
            "source": self.source,
            "spec": self.spec,
            "options": self.options(provider.plugin) if provider.plugin else None,
            **available,
        }
        made = target(**accepted_arguments(target, offered))
        if not isinstance(target, type):
            check_made(provider, made, self.host)
        return made

    def across_hosts(self) -> Composition:
        """The same for ranks on several hosts, once an executor knows that they are: with a communicator that serves them. Raises
        ``PluginError`` where the chosen one does not and was named, or there is no other."""
        chosen, device = self.parts.get("communicator"), self.parts["platform"].name
        if chosen is None or not getattr(chosen, "one_host", False):
            return self
        better = best_communicator(self.host, device, one_host=False)
        if self.config.executor.communicator != AUTO or better is None:
            remedy = f"name {better.name!r}, or 'auto'" if better is not None else "install one that serves several hosts"
            raise PluginError(
                f"executor.communicator: {chosen.name!r} is for ranks on one host, and these are on several; {remedy}"
            )
        reasons = {**self.reasons, "communicator": f"priority {better.priority} on {device}, across hosts"}
        return replace(self, parts={**self.parts, "communicator": better}, reasons=reasons)

    def options(self, plugin: str) -> Any:
        """The section ``plugins.<plugin>``, as the plugin's own model; None for a plugin without options."""
        return section_of(self.host, self.config.plugins, plugin)

    def __reduce__(self) -> tuple[Any, ...]:
        chosen = {kind: (p.plugin, p.name) for kind, p in self.parts.items()}
        extensions = {kind: [(p.plugin, p.name) for p in providers] for kind, providers in self.extensions.items()}
        state = (self.config, self.manifest, self.source, self.spec, chosen, dict(self.reasons), extensions)
        return _rebuild, state


def _rebuild(
    config: EngineConfig,
    manifest: PluginManifest,
    source: ModelSource,
    spec: ModelSpec,
    chosen: Mapping[str, tuple[str, str]],
    reasons: Mapping[str, str],
    extensions: Mapping[str, list[tuple[str, str]]],
) -> Composition:
    host = PluginHost.load(manifest=manifest)

    def provider(kind: str, plugin: str, name: str) -> Provider:
        found = host.registry.find(kind, plugin, name) if plugin else host.get(kind, name)
        if found is None:
            raise PluginError(
                f"{kind} {name!r} of plugin {plugin!r} is not offered in this process, but was in the one that chose it"
            )
        return found

    parts = {kind: provider(kind, *key) for kind, key in chosen.items()}
    more = {kind: tuple(provider(kind, *key) for key in keys) for kind, keys in extensions.items()}
    return Composition(config, host, source, spec, parts, reasons, more)


def compose(config: EngineConfig, host: PluginHost | None = None) -> Composition:
    """Choose and check every part that ``config`` asks for.

    Raises the one error there is (``ModelNotFound``, ``UnknownProviderError``, ``DuplicateProviderError``, ``PluginError``,
    ``ConfigError`` where the model cannot be shared by so many ranks), or a ``CompositionError`` that lists all of them.
    """
    choices = Choices(host if host is not None else PluginHost.load(config.plugins), config)
    source, spec = _choose_model_parts(choices)
    _choose_named(choices)
    extensions = _choose_extensions(choices)
    choices.problems += [CompositionError([p]) for p in capability_problems(config, choices.parts, choices.host)]
    _raise(choices.problems)
    assert source is not None
    assert spec is not None
    for provider in (*choices.parts.values(), *(p for several in extensions.values() for p in several)):
        choices.host.activate(provider.plugin)
    composition = Composition(config, choices.host, source, spec, choices.parts, choices.reasons, extensions)
    logger.info("parts: %s", ", ".join(f"{k}={p.name} ({choices.reasons[k]})" for k, p in sorted(choices.parts.items())))
    return composition


def _choose_model_parts(choices: Choices) -> tuple[ModelSource | None, ModelSpec | None]:
    config, host = choices.config, choices.host
    try:
        source = resolve(config.model, config, host)
    except (PluginError, ValueError) as error:
        choices.problems.append(error)
        return None, None
    spec = None
    model = choices.attempt(lambda: choose_model(source, host, config))
    if model is not None:
        try:
            spec = spec_of(model, source, host)
            _check_ranks(choices, spec, model)
        except (PluginError, ValueError) as error:
            choices.problems.append(error)
    if config.load_format == AUTO:
        choices.attempt(lambda: (host.get("weight_loader", source.loader), f"the format of {source.path}"))
    choices.attempt(lambda: (host.get("tokenizer", source.tokenizer), f"the tokenizer of {source.tokenizer_path or source.path}"))
    return source, spec


def _check_ranks(choices: Choices, spec: ModelSpec, model: Provider) -> None:
    found = parallel_problems(choices.config, spec, model, choices.host)
    if found:
        from pegboard.config.errors import ConfigError  # needs pydantic, which listing plugins does without

        choices.problems.append(ConfigError(found))


def _choose_named(choices: Choices) -> None:
    config = choices.config
    choices.attempt(lambda: choose_executor(choices))
    choices.attempt(lambda: choose_platform(choices))
    for path, kind in NAMED_PARTS:
        name = _value(config, path)
        if kind in ("model", "executor", "platform") or not isinstance(name, str):
            continue
        if kind == "weight_loader" and name == AUTO:
            continue
        if kind == "communicator":
            choose_communicator(choices)
            continue
        if kind == "grammar":
            choose_grammar(choices)
            continue
        if kind == "attention":
            _check_attention(choices, path, name)
            continue
        choices.attempt(partial(choices.selected, path, kind, name))


def _check_attention(choices: Choices, path: str, name: str) -> None:
    """Attention is chosen per layer group in the worker, but a name that means nothing is told before workers start."""
    if name == AUTO:
        return
    try:
        for each in backend_names(name):
            provider, _ = choices.named(path, "attention", each)
            choices.host.activate(provider.plugin)
    except PluginError as error:
        choices.problems.append(error)


def _choose_extensions(choices: Choices) -> dict[str, tuple[Provider, ...]]:
    """What is listed by name, and everything that rides along from the plugins in ``plugins.enabled``. What changes results has
    to be named."""
    config, host = choices.config, choices.host
    found: dict[str, list[Provider]] = {kind: [] for kind in {*(kind for kind, _ in LISTED), *RIDING_ALONG}}
    for kind, path in LISTED:
        for name in _value(config, path):
            try:
                found[kind].append(choices.named(path, kind, name)[0])
            except PluginError as error:
                choices.problems.append(error)
    for record in host.enabled(config.plugins.enabled):
        for offer in record.offers:
            provider = host.registry.find(offer.kind, record.name, offer.name) if offer.kind in RIDING_ALONG else None
            if provider is not None and provider not in found[offer.kind]:
                found[offer.kind].append(provider)
    return {kind: tuple(providers) for kind, providers in found.items()}


def _value(config: EngineConfig, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _raise(problems: list[Exception]) -> None:
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0]
    lines = [str(line) for p in problems for line in getattr(p, "problems", [p])]
    raise CompositionError(lines) from problems[0]


def executor_class(config: EngineConfig) -> type[Executor]:
    """The executor class that ``config`` selects. Loads plugins, but resolves no model."""
    host = PluginHost.load(config.plugins)
    provider, _ = choose_executor(Choices(host, config))
    return load_target(provider, host)  # type: ignore[no-any-return]
