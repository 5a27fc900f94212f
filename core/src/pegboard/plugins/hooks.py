"""HookRelay: calls hooks of those plugins that have a say. Installed is not active."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pluggy

from pegboard.plugins.record import PluginRecord

DECIDING: Final = frozenset(
    {"select_executor", "select_scheduler", "select_preemption_policy", "select_kv_allocator", "select_attention_backend"}
)
"""Hooks that settle "auto": asked of Pegboard's own packages and of enabled plugins, not of merely installed ones."""
OPEN: Final = frozenset({"config_sections", "cli_commands", "add_cli_options"})
"""Hooks of every loaded plugin: a section, a command or an option does nothing until somebody uses it."""


class HookRelay:
    """``relay.configure(draft=...)`` calls the active plugins' implementations and no other's."""

    def __init__(self, pm: pluggy.PluginManager, records: Sequence[PluginRecord]) -> None:
        self._pm = pm
        self._records = records
        self._callers: dict[str, pluggy.HookCaller] = {}

    def __getattr__(self, name: str) -> pluggy.HookCaller:
        if name.startswith("_"):
            raise AttributeError(name)
        caller = self._callers.get(name)
        if caller is None:
            caller = self._callers[name] = self._pm.subset_hook_caller(name, self._silent(name))
        return caller

    def _silent(self, hook: str) -> list[Any]:
        if hook in OPEN:
            return []
        heard = "automatic" if hook in DECIDING else "active"
        return [r.plugin for r in self._records if r.loaded and r.plugin is not None and not getattr(r, heard)]

    def refresh(self) -> None:
        """Forget bound callers, after plugins were registered or activated."""
        self._callers.clear()

    def implemented_by(self, hook: str) -> list[str]:
        """Labels of the plugins that have a say in ``hook``, in calling order. Empty: calling it does nothing."""
        plugins = [impl.plugin for impl in reversed(getattr(self, hook).get_hookimpls())]
        return [r.label for p in plugins for r in self._records if r.plugin is p]
