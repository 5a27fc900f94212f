"""Choosing an attention backend for one layer group. Runs in the worker, where the device is known."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pegboard.contracts.attention import AttentionBackend, AttentionQuery, Support
from pegboard.plugins.attention_pair import pair, unpairable
from pegboard.plugins.checks import load_target
from pegboard.plugins.discovery import OWN_DISTRIBUTIONS
from pegboard.plugins.errors import CompositionError, PluginError
from pegboard.plugins.parts import AUTO, ask, why_chosen
from pegboard.plugins.provider import AttentionBackendProvider, Provider

if TYPE_CHECKING:
    from pegboard.plugins.composition import Composition
    from pegboard.plugins.host import PluginHost

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The chosen backend: its provider, its class, and one line per candidate that says why it was taken or left."""

    provider: Provider
    backend: type[AttentionBackend]
    reasons: tuple[str, ...]


def select_attention(query: AttentionQuery, composition: Composition) -> AttentionChoice:
    """The backend for ``query``. A named one must support it, and so must both of "prefill,decode", which must also be able to
    share a cache; for "auto" ``select_attention_backend`` decides, then the highest priority among those that support it. A
    warning tells of one that fails, and of one that would have come first but cannot serve the query.

    Raises ``CompositionError`` when none does, with every candidate's reasons.
    """
    name, host = composition.config.attention.backend, composition.host
    names = backend_names(name)
    if len(names) == 2:
        choice = _paired(names, query, composition)
    else:
        choice = _auto(query, host) if name == AUTO else _named(names[0], query, host)
    host.activate(choice.provider.plugin)
    logger.info("attention=%s (%s)", choice.provider.name, "; ".join(choice.reasons))
    return choice


def backend_names(setting: str) -> list[str]:
    """The names in ``attention.backend``: one, or two for prefill and decode. Raises ``PluginError`` for others."""
    names = [name.strip() for name in setting.split(",")]
    if len(names) > 2 or not all(names) or (len(names) == 2 and AUTO in names):
        raise PluginError(
            f"attention.backend = {setting!r} is neither a backend's name nor two of them, 'prefill,decode'"
            + (f"; {AUTO!r} is none" if AUTO in names else "")
        )
    return names


def _paired(names: list[str], query: AttentionQuery, composition: Composition) -> AttentionChoice:
    host = composition.host
    chosen = [_named(name, query, host) for name in names]
    if names[0] == names[1]:
        return chosen[0]
    prefill, decode = (choice.backend for choice in chosen)
    problems = unpairable(prefill, decode, query)
    if problems:
        raise CompositionError([f"attention.backend = {','.join(names)!r}: {problem}" for problem in problems])
    for choice in chosen:
        host.activate(choice.provider.plugin)
    providers = {choice.backend: choice.provider for choice in chosen}

    def make(backend: type[AttentionBackend], offered: dict[str, Any]) -> AttentionBackend:
        return composition.make(providers[backend], **offered)  # type: ignore[no-any-return]

    both = pair(prefill, decode, make)  # type: ignore[arg-type]
    provider = replace(chosen[1].provider, name=",".join(names), target=both)
    return AttentionChoice(provider, both, (f"{names[0]} for prefill, {names[1]} for decode: named by attention.backend",))


def _named(name: str, query: AttentionQuery, host: PluginHost) -> AttentionChoice:
    provider = host.get("attention", name)
    backend = load_target(provider, host)
    support = _support(backend, query, host.label(provider))
    if not support.ok:
        raise CompositionError(
            [f"attention.backend = {name!r} of {host.label(provider)} cannot serve {query}: {r}" for r in support.reasons]
        )
    return AttentionChoice(provider, backend, (f"{name}: named by attention.backend",))


def _auto(query: AttentionQuery, host: PluginHost) -> AttentionChoice:
    backends: dict[str, tuple[AttentionBackendProvider, Any]] = {}
    reasons: list[str] = []
    unable: list[tuple[AttentionBackendProvider, str]] = []
    for name, provider in host.automatic("attention").items():
        assert isinstance(provider, AttentionBackendProvider)
        try:
            backend = load_target(provider, host)
            support = _support(backend, query, host.label(provider))
        except PluginError as error:
            logger.warning("attention: backend %r is skipped: %s", name, error)
            reasons.append(f"{name}: failed: {error}")
            continue
        if support.ok:
            backends[name] = (provider, backend)
        else:
            reasons.append(f"{name}: {', '.join(support.reasons)}")
            unable.append((provider, ", ".join(support.reasons)))
    if not backends:
        raise CompositionError([f"attention: no backend can serve {query}", *reasons])
    chosen = ask(host, "select_attention_backend", query=query, candidates={n: p for n, (p, _) in backends.items()})
    if chosen is not None:
        why = f"{chosen}: {why_chosen(host, 'select_attention_backend', chosen)}"
    else:
        chosen = min(backends, key=lambda n: (-backends[n][0].priority, n))
        why = f"{chosen}: supports the query, priority {backends[chosen][0].priority}"
    for provider, problem in unable:
        if provider.priority > backends[chosen][0].priority and _expected(provider, query, host):
            logger.warning("attention: backend %r of %s is skipped: %s", provider.name, host.label(provider), problem)
    left = [f"{n}: supports the query, priority {p.priority}" for n, (p, _) in backends.items() if n != chosen]
    return AttentionChoice(*backends[chosen], (why, *left, *reasons))


def answers(query: AttentionQuery, host: PluginHost) -> dict[str, str]:
    """Every backend by name: "qualifies", or all that keeps it from serving ``query``."""
    found = {}
    for name, provider in host.providers("attention").items():
        try:
            support = _support(load_target(provider, host), query, host.label(provider))
        except PluginError as error:
            found[name] = f"failed: {error}"
            continue
        found[name] = "qualifies" if support.ok else "; ".join(support.reasons)
    return found


def _expected(provider: Provider, query: AttentionQuery, host: PluginHost) -> bool:
    """Whether anybody counts on it: our own packages' for accelerators are no loss on a processor."""
    record = host.record(provider.plugin)
    own = record is not None and record.distribution in OWN_DISTRIBUTIONS
    return not own or query.device.split(":")[0] != "cpu"


def _support(backend: Any, query: AttentionQuery, label: str) -> Support:
    try:
        answer = backend.supports(query)
    except Exception as error:
        raise PluginError(f"supports() of {label} raised {type(error).__name__}: {error}") from error
    if not isinstance(answer, Support):
        raise PluginError(f"supports() of {label} returned {answer!r} instead of a Support")
    return answer
