"""Providers made from a class path, and the static check of a class against its contract."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from pegboard.plugins.errors import PluginError, UnknownProviderError
from pegboard.plugins.provider import KINDS, Provider, import_target
from pegboard.plugins.suggestions import did_you_mean


def provider_of_class(kind: str, path: str) -> Provider:
    """A provider for ``package.module:Class``. Raises ``UnknownProviderError`` with what is wrong with the path."""
    module_name, _, attribute = path.rpartition(":")
    problem = f"{kind} {path!r} is no provider's name, and as a class path it does not work: "
    if not module_name or not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise UnknownProviderError(problem + "write 'package.module:Class', or 'distribution:provider'")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UnknownProviderError(f"{problem}importing {module_name!r} raised {type(error).__name__}: {error}") from error
    try:
        target = import_target(path)
    except PluginError:
        raise UnknownProviderError(
            f"{problem}module {module_name!r} has no attribute {attribute!r}{did_you_mean(attribute, dir(module))}"
        ) from None
    contract = contract_class(kind)
    if not isinstance(target, type) or not issubclass(target, contract):
        raise PluginError(f"{problem}it must name a subclass of {contract.__module__}.{contract.__name__}, but names {target!r}")
    problems = contract_problems(kind, target)
    if problems:
        raise PluginError(f"{problem}{path} {'; '.join(problems)}")
    return provider_class(kind)(name=path, target=path, api=KINDS[kind].api, capabilities=_capabilities(target))


def _capabilities(target: type) -> frozenset[str]:
    """A class chosen by its path states them as ``capabilities``; an executor's flags count too."""
    stated = frozenset(getattr(target, "capabilities", ()))
    flags = {"supports_pp": "pp", "supports_async_scheduling": "async_steps", "uses_ray": "ray"}
    return stated | {capability for flag, capability in flags.items() if getattr(target, flag, False) is True}


def contract_class(kind: str) -> type:
    """The contract of a kind."""
    return import_target(KINDS[kind].contract)  # type: ignore[no-any-return]


def provider_class(kind: str) -> type[Provider]:
    """The descriptor class of a kind."""
    return next(c for c in Provider.__subclasses__() if c.kind == kind)


def contract_problems(kind: str, target: Any) -> list[str]:
    """What a class lacks of its contract, everything at once; nothing for a factory, whose product is checked when it is made."""
    if not isinstance(target, type):
        return [] if callable(target) else [f"is not callable: {target!r}"]
    return missing_members(contract_class(kind), target)


def missing_members(contract: type, target: type) -> list[str]:
    """Missing methods, and methods that cannot take the arguments that the contract requires."""
    required = _members(contract)
    if not issubclass(target, contract):
        # An object may set them when it is made; only methods can be looked for beforehand.
        required = [n for n in required if not isinstance(inspect.getattr_static(contract, n), property)]
    abstract: frozenset[str] = getattr(target, "__abstractmethods__", frozenset())
    missing = sorted(abstract | {n for n in required if not hasattr(target, n)})
    problems = [f"lacks {', '.join(missing)} for the contract {contract.__name__}"] if missing else []
    for name in required:
        if name not in missing:
            problems += _signature_problem(name, inspect.getattr_static(contract, name), inspect.getattr_static(target, name))
    return problems


def _members(contract: type) -> list[str]:
    names = {n for base in contract.__mro__ if base is not object for n in vars(base)}
    abstract: frozenset[str] = getattr(contract, "__abstractmethods__", frozenset())
    return sorted(n for n in names if n in abstract or not n.startswith("_"))


def _signature_problem(name: str, specified: Any, given: Any) -> list[str]:
    """Compare as a caller sees it: positional arguments by number, keyword-only ones by name."""
    if given is specified:
        return []
    wanted, offered = _parameters(specified), _parameters(given)
    if wanted is None or offered is None:
        return []
    positional = [p for p in wanted if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    places = [p for p in offered if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in offered)
    takes_names = any(p.kind is p.VAR_KEYWORD for p in offered)
    needed = [p for p in positional if p.default is p.empty]
    lacking = [] if takes_any else [p.name for p in needed[len(places) :]]
    names = {p.name for p in offered}
    lacking += [
        p.name for p in wanted if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in names and not takes_names
    ]
    surplus = [p.name for p in places[len(positional) :] if p.default is p.empty]
    problems = [f"{name}() does not take {', '.join(lacking)}"] if lacking else []
    return problems + ([f"{name}() requires {', '.join(surplus)}, which the contract does not give"] if surplus else [])


def optional_arguments(kind: str, target: Any) -> list[str]:
    """Arguments that the contract may give and the class does not take: worth a note, not a refusal."""
    if not isinstance(target, type):
        return []
    contract = contract_class(kind)
    notes = []
    for name in _members(contract):
        wanted = _parameters(inspect.getattr_static(contract, name))
        offered = _parameters(inspect.getattr_static(target, name, None))
        if wanted is None or offered is None or any(p.kind is p.VAR_KEYWORD for p in offered):
            continue
        names = {p.name for p in offered}
        lacking = [p.name for p in wanted if p.default is not p.empty and p.name not in names]
        if lacking:
            notes.append(f"{name}() does not take the optional {', '.join(lacking)}")
    return notes


def _parameters(member: Any) -> list[inspect.Parameter] | None:
    """Parameters without ``self`` or ``cls``; None for what is no function."""
    bound = not isinstance(member, staticmethod)
    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    if not inspect.isfunction(function):
        return None
    return list(inspect.signature(function).parameters.values())[1 if bound else 0 :]
