"""Choosing an attention backend for one layer group. Runs in the worker, where the device is known."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pegboard.contracts.attention import AttentionBackend, AttentionQuery, Support
from pegboard.plugins.checks import load_target
from pegboard.plugins.errors import CompositionError, PluginError
from pegboard.plugins.parts import AUTO, ask
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
    """The backend for ``query``. A named one must support it; for "auto" ``select_attention_backend`` decides, then the highest
    priority among those that support it.

    Raises ``CompositionError`` when none does, with every candidate's reasons.
    """
    name, host = composition.config.attention.backend, composition.host
    choice = _auto(query, host) if name == AUTO else _named(name, query, host)
    host.activate(choice.provider.plugin)
    logger.info("attention=%s (%s)", choice.provider.name, "; ".join(choice.reasons))
    return choice


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
    if not backends:
        raise CompositionError([f"attention: no backend can serve {query}", *reasons])
    chosen = ask(host, "select_attention_backend", query=query, candidates={n: p for n, (p, _) in backends.items()})
    if chosen is not None:
        why = (
            f"{chosen}: chosen by select_attention_backend of {' or '.join(host.hook.implemented_by('select_attention_backend'))}"
        )
    else:
        chosen = min(backends, key=lambda n: (-backends[n][0].priority, n))
        why = f"{chosen}: supports the query, priority {backends[chosen][0].priority}"
    left = [f"{n}: supports the query, priority {p.priority}" for n, (p, _) in backends.items() if n != chosen]
    return AttentionChoice(*backends[chosen], (why, *left, *reasons))


def _support(backend: Any, query: AttentionQuery, label: str) -> Support:
    try:
        answer = backend.supports(query)
    except Exception as error:
        raise PluginError(f"supports() of {label} raised {type(error).__name__}: {error}") from error
    if not isinstance(answer, Support):
        raise PluginError(f"supports() of {label} returned {answer!r} instead of a Support")
    return answer
