"""Which installed plugins may be loaded: allow and block lists, by entry point, distribution or ``distribution:entry_point``.

Lists come from the configuration (``plugins.allow``, ``plugins.block``) and from the environment, comma separated. What
either of two block lists names is blocked; what is loaded must be on every allow list that is given. Block wins over
allow. An empty allow list loads none but the standard parts, which only a block list can keep out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pegboard.plugins.discovery import STANDARD, normalized
from pegboard.plugins.record import PluginRecord, PluginStatus
from pegboard.plugins.suggestions import did_you_mean

ALLOW_VARIABLE: Final = "PEGBOARD_PLUGINS_ALLOW"
BLOCK_VARIABLE: Final = "PEGBOARD_PLUGINS_BLOCK"


def matches(record: PluginRecord, text: str) -> bool:
    """Whether ``text`` (entry point, distribution, or both with a colon) means this plugin."""
    text = text.strip()
    names = {record.name, record.entry_point, f"{record.distribution}:{record.entry_point}"}
    return text in names or normalized(text) in {normalized(n) for n in (*names, record.distribution) if n}


def _listed(variable: str) -> list[str] | None:
    value = os.environ.get(variable)
    return None if value is None else [part.strip() for part in value.split(",") if part.strip()]


@dataclass(slots=True)
class Selection:
    """The lists in force, each with the name of the setting that it came from."""

    allow: list[tuple[str, Sequence[str]]] = field(default_factory=list)
    block: list[tuple[str, Sequence[str]]] = field(default_factory=list)

    @classmethod
    def of(cls, allow: Sequence[str] | None, block: Sequence[str]) -> Selection:
        """The configuration's lists joined with those of the environment."""
        allows = (("plugins.allow", allow), (ALLOW_VARIABLE, _listed(ALLOW_VARIABLE)))
        blocks = (("plugins.block", block), (BLOCK_VARIABLE, _listed(BLOCK_VARIABLE)))
        return cls([(s, v) for s, v in allows if v is not None], [(s, v) for s, v in blocks if v])

    def apply(self, record: PluginRecord) -> None:
        """Mark ``record`` as blocked or disabled where the lists say so."""
        for setting, names in self.block:
            if any(matches(record, n) for n in names):
                record.fail(PluginStatus.BLOCKED, f"blocked by {setting}")
                return
        if record.distribution == STANDARD:
            return
        for setting, names in self.allow:
            if not any(matches(record, n) for n in names):
                record.fail(PluginStatus.DISABLED, f"not listed in {setting}")
                return

    def unknown(self, records: Iterable[PluginRecord]) -> list[str]:
        """One sentence for each listed name that means no installed plugin."""
        records = list(records)
        known = {r.entry_point for r in records} | {r.distribution for r in records if r.distribution}
        return [
            f"{setting} names {name!r}, but no installed plugin or distribution is called so{did_you_mean(name, known)}"
            for setting, names in (*self.allow, *self.block)
            for name in names
            if not any(matches(r, name) for r in records)
        ]
