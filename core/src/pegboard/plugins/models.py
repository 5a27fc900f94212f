"""From a model reference to its source, its provider and its spec."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from pegboard.contracts.model import ModelSpec
from pegboard.contracts.model_source import ModelNotFound, ModelSource
from pegboard.plugins.discovery import STANDARD
from pegboard.plugins.errors import DuplicateProviderError, PluginError
from pegboard.plugins.provider import ModelProvider, Provider, import_target
from pegboard.plugins.suggestions import near

if TYPE_CHECKING:
    from pegboard.config import EngineConfig
    from pegboard.plugins.host import PluginHost
    from pegboard.plugins.record import PluginRecord

logger = logging.getLogger(__name__)

AUTO: Final = "auto"
NATIVE: Final = "native"
"""What ``model_impl`` may be besides a name."""


def resolve(ref: str, config: EngineConfig, host: PluginHost) -> ModelSource:
    """Ask the active plugins, then the others: a plugin that is merely installed cannot take a reference away, but naming what
    only it knows is choosing it."""
    active = [r for r in host.records if r.loaded and r.active and "resolve_model" in r.hooks]
    refusal: ModelNotFound | None = None
    failure: PluginError | ValueError | None = None
    for group in (active, *([r] for r in host.records if r.loaded and not r.active and "resolve_model" in r.hooks)):
        try:
            source = _ask(group, ref, config, host)
        except ModelNotFound as error:
            refusal = refusal or error
            continue
        except (PluginError, ValueError) as error:
            if group is active:
                raise
            logger.warning("model: a plugin that is not in use could not be asked for %r: %s", ref, error)
            failure = failure or error
            continue
        if source is not None:
            if group is not active:
                host.activate(group[0].name)
            return source
    problem = refusal or failure
    if problem is not None:
        raise problem
    asked = [r.label for r in host.records if r.loaded and "resolve_model" in r.hooks]
    who = f"asked: {', '.join(asked)}" if asked else "no installed plugin resolves models; pip install pegboard-plugins"
    raise ModelNotFound(
        f"model: nothing knows {ref!r}; give a folder, a .gguf file, a hub id, or a name that a plugin resolves ({who})"
    )


def _ask(group: list[PluginRecord], ref: str, config: EngineConfig, host: PluginHost) -> ModelSource | None:
    """Call ``resolve_model`` of these plugins."""
    others = [r.plugin for r in host.records if r.plugin is not None and r not in group]
    who = " or ".join(r.label for r in group)
    try:
        source = host.pm.subset_hook_caller("resolve_model", others)(ref=ref, config=config)
    except (PluginError, ValueError):
        raise
    except Exception as error:
        raise PluginError(f"model: resolve_model of {who} failed for {ref!r}: {type(error).__name__}: {error}") from error
    if source is not None and not isinstance(source, ModelSource):
        raise PluginError(f"model: resolve_model of {who} returned {source!r} instead of a ModelSource")
    return source


def choose_model(source: ModelSource, host: PluginHost, config: EngineConfig) -> tuple[Provider, str]:
    """The model provider for the checkpoint's architecture, and why.

    ``model_impl`` names one, or is "native": one that lists the architecture, of an enabled plugin, then the standard one, then
    the only other. "auto" is the same, and where none lists it the first that accepts it.
    """
    offers = {n: p for n, p in host.providers("model").items() if isinstance(p, ModelProvider)}
    if config.model_impl not in (AUTO, NATIVE):
        return _named_model(source, host, config)
    wanted = _architectures(source)
    fitting = {n: p for n, p in offers.items() if set(wanted) & set(p.architectures)}
    if fitting:
        return _preferred(fitting, wanted[0], host)
    refusals = []
    for name, provider in host.automatic("model").items():
        if not isinstance(provider, ModelProvider) or not provider.accepts:
            continue
        if config.model_impl == NATIVE:
            refusals.append(f"model_impl = {NATIVE!r} leaves {name!r} out")
        elif reasons := _refusals(provider, source, config, host):
            refusals.append(f"{name} cannot run it: {'; '.join(reasons)}")
        else:
            return provider, f"accepts {wanted[0] if wanted else 'it'}, which no other implements"
    known = sorted({a for p in offers.values() for a in p.architectures})
    close = [m for a in wanted for m in near(a, known)]
    raise PluginError(
        f"model: no installed plugin implements the architecture of {source.path} ({' or '.join(wanted) or 'none stated'}); "
        f"supported: {', '.join(known) or 'none'}"
        + (f"; near: {', '.join(close)}" if close else "")
        + "".join(f"; {refusal}" for refusal in refusals)
    )


def _architectures(source: ModelSource) -> list[str]:
    return [str(a) for a in source.config.get("architectures") or ()]


def _named_model(source: ModelSource, host: PluginHost, config: EngineConfig) -> tuple[Provider, str]:
    name, wanted = config.model_impl, _architectures(source)
    try:
        provider = host.get("model", name)
    except PluginError as error:
        error.args = (f"model_impl: {error}",)
        raise
    if isinstance(provider, ModelProvider) and not set(wanted) & set(provider.architectures):
        stated = " or ".join(wanted) or "an architecture that is not stated"
        if not provider.accepts:
            listed = ", ".join(provider.architectures) or "none by name"
            raise PluginError(f"model_impl: {name!r} does not implement {stated} of {source.path}, but {listed}")
        if reasons := _refusals(provider, source, config, host):
            raise PluginError(f"model_impl: {name!r} cannot run {stated} of {source.path}: {'; '.join(reasons)}")
    return provider, f"model_impl = {name!r}"


def _refusals(provider: ModelProvider, source: ModelSource, config: EngineConfig, host: PluginHost) -> list[str]:
    """Why ``provider`` cannot run a checkpoint whose architecture it does not list."""
    try:
        return [str(reason) for reason in import_target(provider.accepts)(source, config)]
    except Exception as error:
        who = f"model {provider.name!r} of {host.label(provider)}"
        raise PluginError(f"{who}: {provider.accepts} raised {type(error).__name__}: {error}") from error


def _preferred(fitting: Mapping[str, ModelProvider], architecture: str, host: PluginHost) -> tuple[Provider, str]:
    """Of those that list the architecture."""
    groups: dict[str, list[tuple[str, Provider]]] = {"enabled": [], "standard": [], "installed": []}
    for name, provider in fitting.items():
        record = host.record(provider.plugin)
        assert record is not None
        standard = record.distribution == STANDARD
        groups["standard" if standard else "enabled" if record.automatic else "installed"].append((name, provider))
    group, best = next((g, found) for g, found in groups.items() if found)
    if len(best) > 1:
        who = " and ".join(f"{n!r} of {host.label(p)}" for n, p in best)
        raise DuplicateProviderError(
            f"model: {architecture} is implemented by {who}; name one with model_impl, enable one in "
            "plugins.enabled, or block one in plugins.block"
        )
    return best[0][1], f"implements {architecture} ({group})"


def spec_of(provider: Provider, source: ModelSource, host: PluginHost) -> ModelSpec:
    """Call the provider's ``spec`` function."""
    who = f"model {provider.name!r} of {host.label(provider)}"
    path = provider.spec if isinstance(provider, ModelProvider) else ""
    if not path:
        raise PluginError(f"{who} states no spec function; a ModelProvider needs spec='package.module:function'")
    try:
        spec = import_target(path)(source)
    except (PluginError, ValueError):
        raise
    except Exception as error:
        raise PluginError(f"{who}: {path} raised {type(error).__name__}: {error}") from error
    if not isinstance(spec, ModelSpec):
        raise PluginError(f"{who}: {path} returned {spec!r} instead of a ModelSpec")
    return spec
