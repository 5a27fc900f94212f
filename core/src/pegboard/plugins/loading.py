"""Loading: import each plugin under a guard, check it, register it. One plugin's failure is its own."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from pegboard.plugins.errors import PluginError
from pegboard.plugins.hookcheck import forgotten_markers, implementations, offers_of, problems_of
from pegboard.plugins.importing import guarded, import_plugin
from pegboard.plugins.record import DIRECT, PluginRecord, PluginStatus
from pegboard.plugins.registry import status_of_offers
from pegboard.plugins.requirements import host_refused

if TYPE_CHECKING:
    from pegboard.plugins.registry import Registry


def load_all(
    pm: pluggy.PluginManager,
    records: Sequence[PluginRecord],
    extra: Mapping[str, object],
    requires: Mapping[tuple[str, str], tuple[str, ...]],
) -> None:
    """Import every plugin that may be loaded, then let each open hooks of its own. Sets ``record.plugin`` or a failure.

    Hook names are checked later, in ``register``, when the hooks that plugins add are known.
    """
    for record in records:
        if record.loaded:
            refused = host_refused(record, requires.get((record.distribution, record.entry_point), ()))
            if refused:
                record.fail(PluginStatus.INCOMPATIBLE, refused)
            else:
                _import(record, extra, records)
    for record in records:
        if record.loaded and pm.parse_hookimpl_opts(record.plugin, "add_hookspecs") is not None:
            _guarded_call(record, lambda record=record: record.plugin.add_hookspecs(pluginmanager=pm), "add_hookspecs()")


def _import(record: PluginRecord, extra: Mapping[str, object], records: Sequence[PluginRecord]) -> None:
    def make() -> None:
        if record.distribution == DIRECT:
            given = extra[record.name]
            record.plugin = given() if isinstance(given, type) else given
        else:
            record.plugin = import_plugin(record)
        try:
            hash(record.plugin)
        except TypeError:
            raise PluginError(
                f"its plugin object {type(record.plugin).__name__} is not hashable; use a module or a plain class"
            ) from None
        twin = next((r for r in records if r is not record and r.plugin is record.plugin and r.loaded), None)
        if twin is not None:
            record.plugin = None
            record.fail(PluginStatus.DISABLED, f"the same object is loaded as {twin.label}")

    _guarded_call(record, make, "importing it")


def _guarded_call(record: PluginRecord, call: Any, doing: str) -> None:
    try:
        with guarded(record):
            call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        record.plugin = None
        record.fail(PluginStatus.BROKEN, describe(error, doing), error)


def describe(error: BaseException, doing: str) -> str:
    """One line: what was being done, and what was raised, with its place for errors inside the plugin."""
    if isinstance(error, PluginError):
        return str(error)
    if isinstance(error, SystemExit):
        return f"{doing} called sys.exit({error.code!r})"
    try:
        text = str(error) or "(no message)"
    except Exception:
        text = "(its text cannot be made)"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames and not isinstance(error, SyntaxError) else ""
    return f"{doing} raised {type(error).__name__}: {text}{where}"


def register(pm: pluggy.PluginManager, record: PluginRecord, registry: Registry) -> None:
    """Check a plugin's hooks, register it, and ask what it offers."""
    if not record.loaded or record.plugin is None:
        return
    plugin = record.plugin
    problems = problems_of(pm, plugin)
    if problems:
        record.plugin = None
        record.fail(PluginStatus.INCOMPATIBLE, "; ".join(problems))
        return

    def take_in() -> None:
        offers = offers_of(pm, plugin)
        pm.register(plugin, record.name)
        record.hooks = tuple(sorted(name for name, _, _ in implementations(pm, plugin)))
        registry.add(record, offers)

    _guarded_call(record, take_in, "asking it what it offers")
    if not record.loaded:
        if pm.is_registered(plugin):
            pm.unregister(plugin)
        return
    forgotten = forgotten_markers(pm, plugin)
    if forgotten:
        record.notes.append(f"{', '.join(forgotten)} named like a hook but not marked with @hookimpl: never called")
    elif not record.hooks:
        record.notes.append("it has no function marked with @hookimpl, so it does nothing")
    status_of_offers(record)
