"""Checks of a plugin's hook implementations against the specifications, and the calls that ask it what it offers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pluggy

from pegboard.plugins.errors import PluginError
from pegboard.plugins.provider import KINDS, Kind, Provider
from pegboard.plugins.suggestions import did_you_mean

if TYPE_CHECKING:
    from pluggy import HookimplOpts


@functools.cache
def offering_hooks() -> dict[str, Kind]:
    """Hook name to the kind of part that it offers."""
    return {kind.hook: kind for kind in KINDS.values()}


def implementations(pm: pluggy.PluginManager, plugin: Any) -> Iterator[tuple[str, Any, HookimplOpts]]:
    """(hook name, function, options) of everything in ``plugin`` that carries the ``hookimpl`` marker."""
    for attribute in dir(plugin):
        options = pm.parse_hookimpl_opts(plugin, attribute)
        if options is not None:
            yield options.get("specname") or attribute, getattr(plugin, attribute), options


def forgotten_markers(pm: pluggy.PluginManager, plugin: Any) -> list[str]:
    """Functions that are named like a hook but carry no marker: most likely a forgotten ``@hookimpl``."""
    names = []
    for hook in specified(pm):
        function = getattr(plugin, hook, None)
        own = inspect.isroutine(function) and getattr(function, "__module__", None) == getattr(plugin, "__name__", None)
        marked = pm.parse_hookimpl_opts(plugin, hook) is not None or pm.parse_hookspec_opts(plugin, hook) is not None
        if own and not marked:
            names.append(hook)
    return sorted(names)


def specified(pm: pluggy.PluginManager) -> dict[str, pluggy.HookCaller]:
    """Every hook that has a specification."""
    return {name: caller for name, caller in vars(pm.hook).items() if isinstance(caller, pluggy.HookCaller) and caller.has_spec()}


def problems_of(pm: pluggy.PluginManager, plugin: Any) -> list[str]:
    """Why these implementations do not fit the specifications; empty when they do."""
    known = specified(pm)
    problems = []
    for hook, function, options in implementations(pm, plugin):
        if hook not in known:
            if not options.get("optionalhook"):
                problems.append(
                    f"there is no hook {hook!r}{did_you_mean(hook, known)} (mark it @hookimpl(optionalhook=True) if another "
                    "version of the host has it)"
                )
            continue
        spec = known[hook].spec
        assert spec is not None
        extra = [a for a in _arguments(function) if a not in spec.argnames]
        if extra:
            takes = ", ".join(spec.argnames) or "no arguments"
            problems.append(f"{hook}() asks for {', '.join(map(repr, extra))}, but the hook gives {takes}")
        if hook in offering_hooks() and (options.get("wrapper") or options.get("hookwrapper")):
            problems.append(f"{hook}() must not be a wrapper: each plugin is asked for its own parts alone")
    return problems


def _arguments(function: Any) -> list[str]:
    """Names that pluggy will pass: positional parameters without default."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty] + [
        f"*{p.name}" for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty
    ]


def offers_of(pm: pluggy.PluginManager, plugin: Any) -> list[Provider]:
    """Everything that one plugin offers, sorted by kind and name. Raises what its hooks raise, and ``PluginError`` on answers
    that are no providers of the hook's kind."""
    found: dict[tuple[str, str], Provider] = {}
    for hook, function, _ in implementations(pm, plugin):
        kind = offering_hooks().get(hook)
        if kind is None:
            continue
        for provider in _answers(hook, function()):
            if not isinstance(provider, Provider) or getattr(provider, "kind", None) != kind.name:
                raise PluginError(f"{hook}() must give providers of kind {kind.name!r}, but gave {provider!r}")
            if not isinstance(provider.name, str) or not provider.name or ":" in provider.name:
                raise PluginError(f"{hook}() gives a provider named {provider.name!r}; a name is a string without ':'")
            if (kind.name, provider.name) in found:
                raise PluginError(f"{hook}() gives two providers named {provider.name!r}")
            found[kind.name, provider.name] = provider
    return [found[key] for key in sorted(found)]


def _answers(hook: str, answer: Any) -> Iterable[Any]:
    if isinstance(answer, Provider):
        raise PluginError(f"{hook}() must return a list of providers (or yield them), but returned one provider")
    if not isinstance(answer, Iterable):
        raise PluginError(f"{hook}() must return a list of providers (or yield them), but returned {answer!r}")
    return answer
