"""PluginHost: the plugins of one engine. Discovers, loads, and answers what is offered. Never global."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

from pegboard.plugins.discovery import OWN_DISTRIBUTIONS, STANDARD, Installed, discover
from pegboard.plugins.errors import PluginError
from pegboard.plugins.hooks import HookRelay
from pegboard.plugins.loading import load_all, register
from pegboard.plugins.manifest import ManifestEntry, PluginManifest, module_reference, revive
from pegboard.plugins.markers import PROJECT
from pegboard.plugins.provider import Problem, Provider
from pegboard.plugins.record import DIRECT, PluginRecord
from pegboard.plugins.registry import Registry
from pegboard.plugins.requirements import requirement_problems
from pegboard.plugins.selection import Selection, matches
from pegboard.plugins.suggestions import did_you_mean

if TYPE_CHECKING:
    from pegboard.config import PluginsConfig

logger = logging.getLogger(__name__)


class PluginHost:
    """Made with ``load``. ``records`` has one entry per installed or given plugin, loaded or not, sorted by name.

    ``hook`` calls the hooks of the active plugins alone; ``pm`` is the pluggy manager with every loaded one.
    """

    def __init__(self) -> None:
        from pegboard import hookspecs

        self.pm = pluggy.PluginManager(PROJECT)
        self.pm.add_hookspecs(hookspecs)
        self.records: list[PluginRecord] = []
        self.warnings: list[str] = []
        """What a user should look at, although the host works."""
        self.problems: list[Problem] = []
        """Why a host with this configuration must not run; ``load`` raises them."""
        self._order: list[PluginRecord] = []
        self.registry = Registry(self.records)
        self.hook = HookRelay(self.pm, self.records)

    @classmethod
    def load(
        cls,
        plugins: PluginsConfig | None = None,
        *,
        extra: Mapping[str, object] | None = None,
        manifest: PluginManifest | None = None,
        discovery: bool = True,
        quiet: bool = False,
    ) -> PluginHost:
        """Discover and load.

        ``extra`` maps names to plugins given directly (modules or objects); they are active. With ``manifest`` exactly that
        set is loaded. ``discovery=False`` leaves out everything installed. ``quiet`` logs no warnings.

        Raises ``PluginError`` when the configuration names a plugin that is missing or broken, when a required distribution is
        missing, for any broken plugin with ``plugins.strict``, and when this process cannot load what ``manifest`` holds.
        """
        host = cls.inspect(plugins, extra=extra, manifest=manifest, discovery=discovery)
        for warning in [] if quiet else host.warnings:
            logger.warning(warning)
        if host.problems:
            cause = next((r.exception for r in host.records if r.exception is not None), None)
            raise PluginError("; ".join(map(str, host.problems))) from cause
        return host

    @classmethod
    def inspect(
        cls,
        plugins: PluginsConfig | None = None,
        *,
        extra: Mapping[str, object] | None = None,
        manifest: PluginManifest | None = None,
        discovery: bool = True,
    ) -> PluginHost:
        """Like ``load``, but raises nothing and logs no warnings: see ``warnings`` and ``problems``."""
        host = cls()
        if manifest is not None:
            host._load_manifest(manifest)
        else:
            host._load_installed(plugins, dict(extra or {}), discovery)
        return host

    # -- reading -----------------------------------------------------------------------------------------------------

    def providers(self, kind: str) -> dict[str, Provider]:
        """Usable providers of a kind, sorted by name; one that is shadowed by another of its name is at ``owner:name``."""
        return self.registry.providers(kind)

    def get(self, kind: str, name: str) -> Provider:
        """The provider that ``name`` means: a name, ``owner:name``, or ``package.module:Class``.

        Raises ``UnknownProviderError`` (with what there is, and near names), ``DuplicateProviderError`` where several plugins
        offer the name, or ``PluginError`` for a provider of another contract version.
        """
        return self.registry.get(kind, name)

    def record(self, name: str) -> PluginRecord | None:
        """The record of one plugin, by its own name, entry point or distribution."""
        exact = [r for r in self.records if r.name == name]
        return next(iter(exact or [r for r in self.records if matches(r, name)]), None)

    def label(self, provider: Provider) -> str:
        """Who offers ``provider``, for messages: plugin, distribution and version."""
        record = self.record(provider.plugin) if provider.plugin else None
        return record.label if record is not None else f"class path {provider.name!r}"

    def why_absent(self, name: str) -> str:
        """Why no loaded plugin is called ``name``: blocked, broken (and how), or not installed. Empty if one is."""
        found = [r for r in self.records if matches(r, name)]
        if any(r.loaded for r in found):
            return ""
        if found:
            return f"{found[0].label} is {found[0].status}: {found[0].reason}"
        known = {r.name for r in self.records} | {r.distribution for r in self.records if r.distribution}
        return f"no installed plugin or distribution is called {name!r}{did_you_mean(name, known)}"

    def only(self, record: PluginRecord, hook: str, **arguments: Any) -> list[Any]:
        """Call a hook of one plugin. Returns the items of its answer; [] for None."""
        others = [r.plugin for r in self.records if r.plugin is not None and r.plugin is not record.plugin]
        answers = self.pm.subset_hook_caller(hook, others)(**arguments)
        return [item for answer in answers for item in answer]

    def automatic(self, kind: str) -> dict[str, Provider]:
        """Those providers that a choice left at "auto" may fall on."""
        chosen = {r.name for r in self.records if r.automatic}
        return {n: p for n, p in self.providers(kind).items() if p.plugin in chosen}

    def enabled(self, listed: Iterable[str]) -> list[PluginRecord]:
        """The loaded plugins that ``plugins.enabled`` lists, in its order, then those given directly."""
        direct = [r for r in self.records if r.distribution == DIRECT]
        found = [r for name in listed for r in self.records if matches(r, name)] + direct
        return [r for r in {r.name: r for r in found}.values() if r.loaded]

    # -- activity ----------------------------------------------------------------------------------------------------

    def activate(self, plugin: str) -> None:
        """Let the observing hooks of a plugin run, because one of its providers is in use."""
        for record in self.records:
            if record.name == plugin and record.loaded and not record.active:
                record.active = True
                self.hook.refresh()

    def activate_chosen(self, get: Callable[[str], Any]) -> None:
        """Activate the plugins of all parts that a configuration names. ``get`` returns the value at a dotted path (a draft's
        ``get``). Names that mean nothing are passed over: ``compose`` reports them."""
        from pegboard.plugins.parts import NAMED_PARTS

        for path, kind in NAMED_PARTS:
            value = get(path)
            for name in value.split(",") if isinstance(value, str) else value or []:
                try:
                    self.activate(self.get(kind, name.strip()).plugin)
                except PluginError:
                    continue

    def manifest(self, sections: Mapping[str, Any] | None = None) -> PluginManifest:
        """What another process needs to load the same plugins."""
        return PluginManifest.of(self._order, sections)

    # -- loading -----------------------------------------------------------------------------------------------------

    def _load_installed(self, plugins: PluginsConfig | None, extra: dict[str, object], discovery: bool) -> None:
        found = discover() if discovery else None
        installed = found.plugins if found else []
        self.warnings += found.warnings if found else []
        enabled = list(plugins.enabled) if plugins is not None else []
        self._record(installed, extra)
        selection = Selection.of(plugins.allow if plugins else None, plugins.block if plugins else [])
        for record in self.records:
            if record.distribution != DIRECT:
                selection.apply(record)
            if record.loaded:
                named = any(matches(record, n) for n in enabled)
                record.active = named or record.distribution in (STANDARD, DIRECT)
                record.automatic = record.active or record.distribution in OWN_DISTRIBUTIONS
        self.warnings += selection.unknown(self.records)
        requires = {(p.distribution, p.entry_point): p.requires for p in installed}
        load_all(self.pm, self.records, extra, requires)
        self._settle(_calling_order(self.records, enabled))
        self._judge(plugins, enabled)

    def _load_manifest(self, manifest: PluginManifest) -> None:
        installed = discover().plugins
        manifest.check(installed)
        extra = {e.name: revive(e) for e in manifest.plugins if e.distribution == DIRECT}
        self.records += [_from_manifest(e) for e in manifest.plugins]
        load_all(self.pm, self.records, extra, {})
        self._settle(list(self.records))
        self.problems += [Problem("manifest", _state(r)) for r in self.records if not r.loaded]

    def _record(self, installed: list[Installed], extra: Mapping[str, object]) -> None:
        names = [p.entry_point for p in installed] + list(extra)
        for p in installed:
            name = p.entry_point if names.count(p.entry_point) == 1 else f"{p.distribution}:{p.entry_point}"
            self.records.append(PluginRecord(name, p.entry_point, p.distribution, p.version, p.value, p.location))
        for name, plugin in extra.items():
            self.records.append(PluginRecord(name, name, DIRECT, "", module_reference(plugin)))
        self.records.sort(key=lambda r: r.name)

    def _settle(self, order: list[PluginRecord]) -> None:
        """Register what was loaded, and take in what it offers. ``order``: what comes last is called first."""
        self._order = order
        for record in order:
            register(self.pm, record, self.registry)
        self.hook.refresh()
        self.warnings += [_state(r) for r in self.records if r.status in ("broken", "incompatible")]
        self.warnings += [o.reason for r in self.records if r.loaded for o in r.offers if o.reason]
        for record in self.records:
            if record.exception is not None:
                logger.debug("%s is %s", record.label, record.status, exc_info=record.exception)

    def _judge(self, plugins: PluginsConfig | None, enabled: list[str]) -> None:
        """Turn what the configuration insists on, and is not there, into problems."""
        if plugins is None:
            return
        self.problems += [Problem("plugins.enabled", why) for name in enabled if (why := self.why_absent(name))]
        self.problems += requirement_problems(plugins.required, self.records)
        for name in plugins.model_extra or {}:
            if any(r.name == name for r in self.records) and (why := self.why_absent(name)):
                self.problems.append(Problem(f"plugins.{name}", why))
        if plugins.strict:
            bad = [r for r in self.records if r.status in ("broken", "incompatible")]
            self.problems += [Problem("plugins.strict", _state(r)) for r in bad]
        if self.problems:
            told = " ".join(p.message for p in self.problems)
            self.warnings = [w for w in self.warnings if w not in told]


def _state(record: PluginRecord) -> str:
    return f"{record.label} is {record.status}: {record.reason}"


def _from_manifest(entry: ManifestEntry) -> PluginRecord:
    return PluginRecord(
        entry.name,
        entry.entry_point,
        entry.distribution,
        entry.version,
        entry.value,
        active=entry.active,
        automatic=entry.automatic,
    )


def _calling_order(records: Iterable[PluginRecord], enabled: list[str]) -> list[PluginRecord]:
    """Order of registration. pluggy calls the last registered first, so: standard parts, then the others backwards by name,
    then the enabled ones backwards as listed, then those given directly. Hooks are thus asked in the order in which a user
    listed the plugins, whatever order they were found in."""

    def place(record: PluginRecord) -> tuple[int, int]:
        if record.distribution == DIRECT:
            return 3, 0
        listed = next((i for i, name in enumerate(enabled) if matches(record, name)), None)
        if listed is not None:
            return 2, -listed
        return (0 if record.distribution == STANDARD else 1), 0

    return sorted(sorted(records, key=lambda r: r.name, reverse=True), key=place)
