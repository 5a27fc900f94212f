"""What ``pegboard plugins`` tells, as plain data: records, providers, and everything that is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pegboard.plugins.checks import load_target
from pegboard.plugins.class_path import optional_arguments
from pegboard.plugins.discovery import STANDARD
from pegboard.plugins.errors import PluginError
from pegboard.plugins.options import model_of, sections, sections_of
from pegboard.plugins.parts import NAMED_PARTS, SELECTED, Choices, choose_executor
from pegboard.plugins.provider import KINDS, ModelProvider, Provider, import_target
from pegboard.plugins.record import OfferRecord, PluginRecord

if TYPE_CHECKING:
    from pegboard.config import EngineConfig
    from pegboard.plugins.host import PluginHost


def plugin_data(record: PluginRecord) -> dict[str, Any]:
    """One plugin."""
    return {
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "entry_point": f"{record.entry_point} = {record.value}" if record.value else record.entry_point,
        "location": record.location,
        "status": str(record.status),
        "reason": record.reason,
        "active": record.active,
        "hooks": list(record.hooks),
        "providers": [_offer_data(o) for o in record.offers],
        "notes": list(record.notes),
    }


def _offer_data(offer: OfferRecord) -> dict[str, Any]:
    return {
        "kind": offer.kind,
        "name": offer.name,
        "api": offer.api if isinstance(offer.api, int) else repr(offer.api),
        "host_api": KINDS[offer.kind].api,
        "usable": not offer.reason,
        "reason": offer.reason,
        "summary": offer.summary,
    }


def provider_data(provider: Provider, host: PluginHost) -> dict[str, Any]:
    """One provider, without loading it."""
    record = host.record(provider.plugin)
    target = provider.target if isinstance(provider.target, str) else _path(provider.target)
    data = {
        "kind": provider.kind,
        "name": provider.name,
        "plugin": provider.plugin,
        "distribution": record.distribution if record else "",
        "version": record.version if record else "",
        "target": target,
        "api": provider.api,
        "capabilities": sorted(provider.capabilities),
        "requires": sorted(provider.requires),
        "summary": provider.summary,
    }
    if isinstance(provider, ModelProvider):
        data["architectures"] = list(provider.architectures)
    if hasattr(provider, "priority"):
        data["priority"] = provider.priority
    return data


def _path(target: Any) -> str:
    return f"{getattr(target, '__module__', '')}:{getattr(target, '__qualname__', repr(target))}"


def kind_data(kind: str, host: PluginHost) -> dict[str, Any]:
    """One kind of part: its contract, and what is offered."""
    facts = KINDS[kind]
    return {
        "kind": facts.name,
        "hook": facts.hook,
        "contract": facts.contract,
        "api": facts.api,
        "summary": facts.summary,
        "providers": {name: provider_data(p, host) for name, p in host.providers(kind).items()},
    }


def choice_of(kind: str, config: EngineConfig, host: PluginHost) -> str:
    """Which part of a kind ``config`` means, and why; or why none. Empty for kinds that are not chosen like that."""
    choices = Choices(host, config)
    try:
        if kind == "executor":
            provider, reason = choose_executor(choices)
        elif kind in SELECTED:
            path = next(path for path, named in NAMED_PARTS if named == kind)
            provider, reason = choices.selected(path, kind, attrgetter(path)(config))
        else:
            return ""
    except PluginError as error:
        return str(error)
    return f"{provider.name} ({reason})"


def find(name: str, host: PluginHost) -> list[dict[str, Any]]:
    """Everything called ``name``: plugins (also by distribution), kinds, providers. Each as ``{"what": …, …}``."""
    from pegboard.plugins.selection import matches

    found = [{"what": "plugin", **plugin_data(r)} for r in host.records if matches(r, name)]
    if name in KINDS:
        found.append({"what": "kind", **kind_data(name, host)})
    found += [{"what": "provider", **provider_data(p, host)} for p in named_providers(name, host)]
    return found


def named_providers(name: str, host: PluginHost) -> list[Provider]:
    """Usable providers called ``name``, or ``kind:name``, of any kind."""
    return [
        provider
        for kind in sorted(KINDS)
        for key, provider in host.providers(kind).items()
        if name in (key, provider.name, f"{kind}:{key}", f"{kind}:{provider.name}")
    ]


def check_plugin(record: PluginRecord, host: PluginHost) -> tuple[list[str], list[str]]:
    """Load everything that one plugin offers and compare it with the contracts. (problems, notes)."""
    if not record.loaded:
        return [f"{record.label} is {record.status}: {record.reason}"], []
    offered = [host.registry.find(o.kind, record.name, o.name) for o in record.offers]
    found, more = check_providers([p for p in offered if p is not None], host)
    problems = [o.reason for o in record.offers if o.reason] + found
    notes = [f"{record.label}: {note}" for note in record.notes] + more
    try:
        for section in sections_of(host, record):
            model_of(section)
    except Exception as error:
        problems.append(f"{record.label}: its section cannot be loaded: {type(error).__name__}: {error}")
    return problems, notes


def check_providers(providers: Iterable[Provider], host: PluginHost) -> tuple[list[str], list[str]]:
    """Load these parts and compare them with their contracts. (problems, notes)."""
    problems: list[str] = []
    notes: list[str] = []
    for provider in providers:
        _check_provider(provider, host, problems, notes)
    return problems, notes


def _check_provider(provider: Provider, host: PluginHost, problems: list[str], notes: list[str]) -> None:
    who = f"{provider.kind} {provider.name!r} of {host.label(provider)}"
    try:
        target = load_target(provider, host)
        notes += [f"{who}: {note}" for note in optional_arguments(provider.kind, target)]
    except PluginError as error:
        problems.append(str(error))
    if isinstance(provider, ModelProvider):
        try:
            import_target(provider.spec)
        except Exception as error:
            problems.append(f"{who}: its spec function {provider.spec!r} cannot be loaded: {error}")


def doctor(host: PluginHost, load_targets: bool = False) -> tuple[list[str], list[str]]:
    """(problems, notes) of the whole installation. ``load_targets`` also loads every part, which may import torch."""
    told = [*map(str, host.problems), *host.warnings]
    problems = list(dict.fromkeys(told))
    notes: list[str] = []
    for kind, name, text in host.registry.duplicates():
        offers = host.registry.offers[kind][name]
        standard = any(o.record.distribution == STANDARD for o in offers)
        (notes if standard else problems).append(text)
    for record in host.records:
        if load_targets and record.loaded:
            found, more = check_plugin(record, host)
            problems += [p for p in found if p not in problems]
            notes += more
        else:
            notes += [f"{record.label}: {note}" for note in record.notes]
    try:
        sections(host)
    except PluginError as error:
        problems.append(str(error))
    return problems, notes
