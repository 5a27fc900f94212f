"""Version requirements: what a plugin needs of the host, and what a configuration needs installed."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pegboard.plugins.discovery import host_version, installed_version, normalized
from pegboard.plugins.errors import PluginError
from pegboard.plugins.markers import PROJECT
from pegboard.plugins.provider import Problem
from pegboard.plugins.record import PluginRecord

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def parse_requirement(text: str) -> Requirement:
    """One entry of ``plugins.required``. Raises ``PluginError`` with what is wrong with it."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return Requirement(text)
    except InvalidRequirement as error:
        reason = str(error).partition("\n")[0]
        raise PluginError(f"{text!r} is no requirement: {reason}; write 'name' or 'name>=version'") from None


def host_refused(record: PluginRecord, requires: Iterable[str]) -> str:
    """Why a plugin's own metadata excludes this host, or nothing. ``requires`` are its ``Requires-Dist`` lines."""
    for line in requires:
        if normalized(re.split(r"[^A-Za-z0-9._-]", line.strip(), maxsplit=1)[0]) != PROJECT:
            continue
        from packaging.requirements import InvalidRequirement, Requirement

        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            return f"its metadata holds an invalid requirement: {line!r}"
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and not requirement.specifier.contains(host_version(), prereleases=True):
            return (
                f"it requires {PROJECT}{requirement.specifier}, and this is {PROJECT} {host_version()}; install a release of "
                f"{record.distribution} that supports it, or the {PROJECT} that it asks for"
            )
    return ""


def unmet_requirement(distribution: str, module: str) -> str:
    """The requirement of ``distribution`` whose name is that of the missing ``module``, such as "ray>=2.50", or nothing."""
    if not distribution:  # of a plugin that was given directly
        return ""
    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    wanted = normalized(module.partition(".")[0])
    plain = [line.partition(";")[0].strip() for line in lines]
    return next((line for line in plain if normalized(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]) == wanted), "")


def requirement_problems(required: Sequence[str], records: Iterable[PluginRecord]) -> list[Problem]:
    """One problem per entry of ``plugins.required`` that this installation does not satisfy."""
    problems: list[str] = []
    records = list(records)
    for line in required:
        try:
            requirement = parse_requirement(line)
        except PluginError as error:
            problems.append(str(error))
            continue
        version = installed_version(requirement.name)
        own = [r for r in records if r.distribution == normalized(requirement.name)]
        if version is None:
            problems.append(f"{line!r} is not installed; pip install {line!r}")
        elif not requirement.specifier.contains(own[0].version if own else version, prereleases=True):
            problems.append(f"{line!r}, but {requirement.name} {version} is installed; pip install -U {line!r}")
        problems += [f"{line!r}, but {r.label} is {r.status}: {r.reason}" for r in own if not r.loaded]
    return [Problem("plugins.required", text) for text in problems]
