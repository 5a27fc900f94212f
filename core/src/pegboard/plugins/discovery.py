"""Discovery: which plugins are installed, from metadata alone. Imports no plugin.

A distribution may be visible more than once: an editable install beside stale metadata, an egg-info beside a dist-info,
the same folder twice on the path. It counts once. Of several versions the first on ``sys.path`` counts, because that is
the one Python imports; inside one folder a dist-info goes before an egg-info, and the higher version first.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from pegboard.plugins.markers import PROJECT

logger = logging.getLogger(__name__)

GROUP: Final = PROJECT
"""The entry-point group of plugins."""
STANDARD: Final = "pegboard-plugins"
"""The distribution of the standard parts."""
OWN_DISTRIBUTIONS: Final = frozenset({STANDARD, "pegboard-executor-mp", "pegboard-executor-ray", "pegboard-attn-triton"})
"""Pegboard's own packages: choices left at "auto" may fall on their parts once they are installed."""


def normalized(name: str) -> str:
    """A distribution's name in the one spelling that compares equal (packaging's rule)."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True, slots=True)
class Installed:
    """One entry point of one distribution."""

    entry_point: str
    value: str
    distribution: str
    version: str
    location: str
    requires: tuple[str, ...] = ()


@dataclass(slots=True)
class Discovery:
    """What is installed, and warnings about distributions that are visible in several versions."""

    plugins: list[Installed] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def discover() -> Discovery:
    """Every installed plugin, sorted by entry point and distribution."""
    found = Discovery()
    names = {_name(dist) for dist in importlib.metadata.distributions() if _offers_plugins(dist)}
    for name in sorted(names):
        dist = _pick(name, found)
        if dist is not None:
            found.plugins += _entry_points(name, dist)
    found.plugins.sort(key=lambda p: (p.entry_point, p.distribution))
    return found


def _offers_plugins(dist: importlib.metadata.Distribution) -> bool:
    """Without parsing: a plain look for the group's heading keeps a scan of hundreds of distributions cheap."""
    text = dist.read_text("entry_points.txt")
    return text is not None and re.search(rf"^\[\s*{GROUP}\s*\]", text, re.MULTILINE) is not None


def _name(dist: importlib.metadata.Distribution) -> str:
    """From the metadata, or from the folder's name where the metadata is gone."""
    stated = dist.metadata["Name"] if _complete(dist) else None
    return normalized(stated or os.path.basename(_path(dist)).partition("-")[0])


def _complete(dist: importlib.metadata.Distribution) -> bool:
    return bool(dist.read_text("METADATA") or dist.read_text("PKG-INFO"))


def _path(dist: importlib.metadata.Distribution) -> str:
    return os.path.realpath(str(getattr(dist, "_path", dist.locate_file(""))))


def _pick(name: str, found: Discovery) -> importlib.metadata.Distribution | None:
    """The one distribution that counts among all visible ones called ``name``."""
    candidates = list(_ordered(_visible(name)))
    if not candidates:
        return None
    chosen = candidates[0]
    same = [d for d in candidates if d.version == chosen.version]
    others = [d for d in candidates if d.version != chosen.version]
    # Stale metadata of the same version may lack the entry points that its twin has.
    chosen = next((d for d in same if _offers_plugins(d)), chosen)
    for twin in same:
        if twin is not chosen:
            logger.debug("%s %s is visible twice: %s is used, %s is not", name, chosen.version, _path(chosen), _path(twin))
    if others:
        hidden = ", ".join(f"{d.version} in {_path(d)}" for d in others)
        found.warnings.append(
            f"distribution {name} is visible in several versions: {chosen.version} in {_path(chosen)} is used because it comes "
            f"first on sys.path; not used: {hidden}; uninstall what you do not need"
        )
    return chosen


def _visible(name: str) -> Iterator[importlib.metadata.Distribution]:
    """Distributions called ``name`` in the order of sys.path, each place once; empty leftovers are passed over."""
    seen: set[str] = set()
    for dist in importlib.metadata.distributions(name=name):
        path = _path(dist)
        if path in seen:
            logger.debug("%s is on the path twice: %s", name, path)
            continue
        seen.add(path)
        if _complete(dist):
            yield dist
        else:
            logger.debug("%s holds no metadata and is ignored", path)


def _ordered(dists: Iterable[importlib.metadata.Distribution]) -> Iterator[importlib.metadata.Distribution]:
    """Keep the order of folders; inside a folder do not depend on the order in which the file system lists it."""
    folders: dict[str, list[importlib.metadata.Distribution]] = {}
    for dist in dists:
        folders.setdefault(os.path.dirname(_path(dist)), []).append(dist)
    for inside in folders.values():
        if len(inside) > 1:
            from packaging.version import InvalidVersion, Version

            def rank(dist: importlib.metadata.Distribution) -> tuple[bool, Version, str]:
                try:
                    version = Version(dist.version)
                except InvalidVersion:
                    version = Version("0")
                return _path(dist).endswith(".dist-info"), version, _path(dist)

            inside.sort(key=rank, reverse=True)
        yield from inside


def _entry_points(name: str, dist: importlib.metadata.Distribution) -> Iterator[Installed]:
    requires = tuple(dist.requires or ())
    seen: set[str] = set()
    for entry in sorted(dist.entry_points.select(group=GROUP), key=lambda e: (e.name, e.value)):
        if entry.name in seen:
            logger.debug("%s states entry point %s twice", name, entry.name)
            continue
        seen.add(entry.name)
        yield Installed(entry.name, entry.value, name, dist.version, os.path.dirname(_path(dist)), requires)


def host_version() -> str:
    """Version of the installed core."""
    try:
        return importlib.metadata.version(PROJECT)
    except importlib.metadata.PackageNotFoundError:
        return "0"


def installed_version(distribution: str) -> str | None:
    """Version of any installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
