"""Typed options of plugins: the sections ``plugins.<name>`` of the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pegboard.plugins.errors import PluginError
from pegboard.plugins.provider import ConfigSection, import_target

if TYPE_CHECKING:
    from pegboard.config import PluginsConfig
    from pegboard.plugins.host import PluginHost
    from pegboard.plugins.record import PluginRecord


def sections(host: PluginHost) -> dict[str, ConfigSection]:
    """Section name to section, of all loaded plugins: those that ``config_sections`` gives, and one per plugin whose providers
    state a ``config`` model. Raises ``PluginError`` where two plugins claim one name, or a hook fails."""
    found: dict[str, tuple[str, ConfigSection]] = {}
    for record in host.records:
        if not record.loaded:
            continue
        for section in sections_of(host, record):
            other = found.setdefault(section.name, (record.name, section))
            if other[0] != record.name:
                raise PluginError(
                    f"plugins.{section.name}: {record.label} and plugin {other[0]!r} both claim this section; block one"
                )
    return {name: section for name, (_, section) in sorted(found.items())}


def sections_of(host: PluginHost, record: PluginRecord) -> list[ConfigSection]:
    """The sections of one loaded plugin. Raises ``PluginError`` where its hook fails."""
    return [*_stated(host, record.plugin, record.label), *_implied(host, record.name)]


def _stated(host: PluginHost, plugin: Any, label: str) -> list[ConfigSection]:
    others = [r.plugin for r in host.records if r.plugin is not None and r.plugin is not plugin]
    try:
        answers = host.pm.subset_hook_caller("config_sections", others)()
        stated = [section for answer in answers for section in answer]
    except Exception as error:
        raise PluginError(f"config_sections of {label} failed: {type(error).__name__}: {error}") from error
    for section in stated:
        if not isinstance(section, ConfigSection):
            raise PluginError(f"config_sections of {label} must give ConfigSection objects, but gave {section!r}")
        if not isinstance(section.name, str):
            raise PluginError(f"config_sections of {label} gives a section named {section.name!r}; a name is text")
    return stated


def _implied(host: PluginHost, plugin: str) -> list[ConfigSection]:
    models = []
    for kind in host.registry.offers.values():
        for offers in kind.values():
            models += [o.provider.config for o in offers if o.record.name == plugin and o.provider.config is not None]
    return [ConfigSection(plugin, models[0])] if models else []


def model_of(section: ConfigSection) -> Any:
    """The pydantic model of a section, imported where it is given as a path."""
    return import_target(section.model) if isinstance(section.model, str) else section.model


def section_of(host: PluginHost, plugins: PluginsConfig, plugin: str) -> Any:
    """The validated section of ``plugin``; defaults where the configuration says nothing; None without a model.

    Asks that plugin alone: what others claim, or fail to tell, is no matter of its parts.
    """
    record = host.record(plugin)
    stated = sections_of(host, record) if record is not None and record.loaded else []
    section = next((s for s in stated if s.name == plugin), None)
    if section is None:
        return None
    model = model_of(section)
    given = (plugins.model_extra or {}).get(plugin, {})
    return given if isinstance(given, model) else model.model_validate(given)
