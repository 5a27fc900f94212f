"""PluginRecord: what the host knows of one plugin, whether or not it could be loaded."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Final

DIRECT: Final = ""
"""``distribution`` of a plugin that a script or test gave to the host directly."""


class PluginStatus(enum.StrEnum):
    """LOADED: its hooks are registered. DISABLED: left out by an allow list. BLOCKED: on a block list; both are not imported.
    INCOMPATIBLE: made for another host. BROKEN: importing it, or asking it what it offers, raised."""

    LOADED = "loaded"
    DISABLED = "disabled"
    BLOCKED = "blocked"
    INCOMPATIBLE = "incompatible"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class OfferRecord:
    """One provider that a plugin offers. ``reason`` is empty when it can be used."""

    kind: str
    name: str
    api: Any
    summary: str = ""
    reason: str = ""


@dataclass(slots=True)
class PluginRecord:
    """One plugin. ``name`` is its entry-point name (``distribution:name`` where two distributions use the same one)."""

    name: str
    entry_point: str
    distribution: str
    version: str
    value: str
    location: str = ""
    status: PluginStatus = PluginStatus.LOADED
    reason: str = ""
    active: bool = False
    """Its observing hooks run: it is a standard part, enabled, given directly, or one of its providers is in use."""
    automatic: bool = False
    """Choices left at "auto" may fall on it: it is one of Pegboard's own packages, enabled, or given directly."""
    plugin: Any = field(default=None, repr=False)
    exception: BaseException | None = field(default=None, repr=False)
    hooks: tuple[str, ...] = ()
    offers: tuple[OfferRecord, ...] = ()
    notes: list[str] = field(default_factory=list)
    """What ``pegboard plugins doctor`` should mention although the plugin works."""

    @property
    def loaded(self) -> bool:
        return self.status is PluginStatus.LOADED

    @property
    def label(self) -> str:
        """As named in messages: plugin, distribution and version."""
        if self.distribution == DIRECT:
            return f"plugin {self.name!r} (given directly)"
        return f"plugin {self.entry_point!r} of {self.distribution} {self.version}"

    def fail(self, status: PluginStatus, reason: str, exception: BaseException | None = None) -> None:
        self.status, self.reason, self.exception = status, reason, exception
        self.active = self.automatic = False
        self.hooks, self.offers = (), ()
