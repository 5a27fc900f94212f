"""Checks when a part is loaded for use, and checks over the whole composition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pegboard.plugins.class_path import contract_class, contract_problems, missing_members
from pegboard.plugins.errors import PluginError
from pegboard.plugins.provider import KINDS, Provider
from pegboard.plugins.requirements import unmet_requirement
from pegboard.plugins.suggestions import CAPABILITY_PACKAGES, did_you_mean

if TYPE_CHECKING:
    from pegboard.config import EngineConfig
    from pegboard.plugins.host import PluginHost


def load_target(provider: Provider, host: PluginHost) -> Any:
    """The class or factory of a provider, checked against its contract. ``PluginError`` names the plugin, and keeps the cause."""
    who = f"{provider.kind} {provider.name!r} of {host.label(provider)}"
    try:
        target = provider.load()
    except Exception as error:
        remedy = _remedy(error, provider, host)
        raise PluginError(
            f"{who} cannot be loaded: {type(error).__name__}: {error} (target {provider.target!r}){remedy}"
        ) from error
    problems = contract_problems(provider.kind, target)
    if problems:
        raise PluginError(
            f"{who} does not keep version {KINDS[provider.kind].api} of its contract: {provider.target!r} {'; '.join(problems)}"
        )
    return target


def _remedy(error: Exception, provider: Provider, host: PluginHost) -> str:
    """What to install, where a module is missing that the plugin's own metadata asks for."""
    record = host.record(provider.plugin) if provider.plugin else None
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    requirement = unmet_requirement(record.distribution, missing) if record is not None and missing else ""
    return f"; pip install {requirement!r}" if requirement else ""


def check_made(provider: Provider, made: Any, host: PluginHost) -> None:
    """What a factory made must have the contract's members, like a class."""
    problems = missing_members(contract_class(provider.kind), type(made))
    if problems:
        raise PluginError(
            f"{provider.kind} {provider.name!r} of {host.label(provider)} made a {type(made).__name__} that {'; '.join(problems)}"
        )


def capability_problems(config: EngineConfig, parts: Mapping[str, Provider], host: PluginHost) -> list[str]:
    """Every capability that the configuration or a part needs, and the part that should have it lacks."""
    settings = config.executor
    needs = [
        (f"executor.{field} = {size}", kind, capability)
        for field, size, capability in (
            ("tensor_parallel_size", settings.tensor_parallel_size, "tp"),
            ("pipeline_parallel_size", settings.pipeline_parallel_size, "pp"),
        )
        if size > 1
        for kind in ("executor", "model")
    ]
    for provider in parts.values():
        for need in sorted(provider.requires):
            kind, _, capability = need.partition(".")
            needs.append((f"{provider.kind} {provider.name!r} of {host.label(provider)}", kind, capability))
    return [text for who, kind, capability in needs if (text := _lacking(who, kind, capability, parts, host))]


def _lacking(who: str, kind: str, capability: str, parts: Mapping[str, Provider], host: PluginHost) -> str:
    part = parts.get(kind)
    if kind not in KINDS:
        return f"{who} needs {capability!r} of {kind!r}, which is no kind of part{did_you_mean(kind, KINDS)}"
    if part is None or capability in part.capabilities:
        return ""
    able = [n for n, p in host.providers(kind).items() if capability in p.capabilities]
    package = CAPABILITY_PACKAGES.get((kind, capability))
    if kind == "model":  # another one would be of no use to this checkpoint
        return f"{who} needs capability {capability!r} of the model, which {part.name!r} of {host.label(part)} lacks; set it to 1"
    remedy = f"one that has it: {', '.join(able)}" if able else f"pip install {package}" if package else "no installed one has it"
    return f"{who} needs capability {capability!r} of the {kind}, which {part.name!r} of {host.label(part)} lacks; {remedy}"
