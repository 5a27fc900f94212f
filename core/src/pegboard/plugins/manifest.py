"""PluginManifest: the exact set of plugins of one engine, sent to every process that belongs to it.

A child loads exactly these and refuses a difference, so that a name means the same class in every process.
"""

from __future__ import annotations

import base64
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from pegboard.plugins.discovery import Installed, host_version
from pegboard.plugins.errors import PluginError
from pegboard.plugins.record import DIRECT, PluginRecord


class ManifestEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One plugin. ``distribution`` is empty for one that was given directly: ``value`` then names its module, or ``payload``
    holds the object (cloudpickle, base64). ``config`` is its section of the configuration."""

    name: str
    entry_point: str
    distribution: str
    version: str
    value: str
    active: bool = False
    automatic: bool = False
    payload: str = ""
    config: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def label(self) -> str:
        if self.distribution == DIRECT:
            return f"plugin {self.name!r} (given directly)"
        return f"plugin {self.entry_point!r} of {self.distribution} {self.version}"


class PluginManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Comparable, picklable, and plain enough for JSON."""

    host_version: str
    plugins: tuple[ManifestEntry, ...] = ()

    @classmethod
    def of(cls, records: Iterable[PluginRecord], sections: Mapping[str, Any] | None = None) -> PluginManifest:
        """From a host's records in the order of registration: those that are active or that "auto" may fall on. ``sections`` by
        plugin name."""
        wanted = [r for r in records if r.loaded and (r.active or r.automatic)]
        return cls(host_version=host_version(), plugins=tuple(_entry(r, (sections or {}).get(r.name)) for r in wanted))

    def check(self, installed: Iterable[Installed]) -> None:
        """Raise ``PluginError`` listing every entry that this process would load otherwise than the one that wrote it."""
        available = {(p.distribution, p.entry_point): p for p in installed}
        differences = []
        if self.host_version != host_version():
            differences.append(f"pegboard is {host_version()} here and {self.host_version} there")
        for entry in self.plugins:
            if entry.distribution == DIRECT:
                continue
            here = available.get((entry.distribution, entry.entry_point))
            if here is None:
                differences.append(f"{entry.label} is not installed here")
            elif here.version != entry.version:
                differences.append(f"{entry.label} is version {here.version} here, in {here.location}")
            elif here.value != entry.value:
                differences.append(f"{entry.label} points to {here.value!r} here and to {entry.value!r} there")
        if differences:
            raise PluginError(
                "this process would not load the plugins of the process that started it:\n"
                + "\n".join(f"  - {d}" for d in differences)
                + f"\ngive both the same environment (this one runs {sys.executable})"
            )


def _entry(record: PluginRecord, section: Any) -> ManifestEntry:
    dump = getattr(section, "model_dump", None)
    config = dump(mode="json") if dump is not None else dict(section or {})
    return ManifestEntry(
        name=record.name,
        entry_point=record.entry_point,
        distribution=record.distribution,
        version=record.version,
        value=record.value,
        active=record.active,
        automatic=record.automatic,
        payload=_payload(record),
        config=config,
    )


def _payload(record: PluginRecord) -> str:
    """A plugin given directly travels as the name of its module, or as a pickled object."""
    if record.distribution != DIRECT or record.value:
        return ""
    import cloudpickle

    try:
        if record.plugin is sys.modules.get("__main__"):
            raise TypeError("it is the script's own module, which a new process does not have")
        return base64.b85encode(cloudpickle.dumps(record.plugin)).decode()
    except Exception as error:
        raise PluginError(
            f"{record.label} cannot be sent to another process ({type(error).__name__}: {error}); give it an entry point in the "
            "group 'pegboard', or keep what it holds picklable"
        ) from error


def module_reference(plugin: Any) -> str:
    """The name under which another process can import a directly given plugin, or nothing."""
    if not isinstance(plugin, types.ModuleType):
        return ""
    if sys.modules.get(plugin.__name__) is plugin and plugin.__name__ != "__main__":
        return plugin.__name__
    return ""


def revive(entry: ManifestEntry) -> Any:
    """The object of a directly given plugin in another process."""
    import importlib
    import pickle

    try:
        if entry.value:
            return importlib.import_module(entry.value)
        return pickle.loads(base64.b85decode(entry.payload))
    except Exception as error:
        raise PluginError(
            f"{entry.label} cannot be made again in this process ({type(error).__name__}: {error}); "
            "give it an entry point in the group 'pegboard'"
        ) from error
