"""From what a user gives to what an engine is made of: sources, plugins, their hooks on the configuration, and the composition.

``check`` does everything that needs no model and raises nothing; ``prepare`` goes on to the composition.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pegboard.config.draft import ConfigDraft
from pegboard.config.errors import ConfigError, Problem, unique
from pegboard.config.load import load_draft
from pegboard.config.models import PLUGINS_KEYS, EngineConfig, PluginsConfig
from pegboard.config.provenance import Layer, Provenance
from pegboard.engine.plugin_config import configure, declare_sections, part_problems, validate

if TYPE_CHECKING:
    from pegboard.plugins import Composition, PluginHost

logger = logging.getLogger(__name__)

ConfigFile = str | os.PathLike[str] | None


@dataclass(frozen=True, eq=False)
class Checked:
    """A configuration as far as it could be made. ``config`` is None exactly if there are ``problems``; ``host`` is None if the
    settings of plugin loading are themselves wrong."""

    draft: ConfigDraft
    host: PluginHost | None
    config: EngineConfig | None
    problems: tuple[Problem, ...]


@dataclass(frozen=True, eq=False)
class Prepared:
    """All that an engine is made of. ``draft`` still knows who set what."""

    config: EngineConfig
    draft: ConfigDraft
    host: PluginHost
    composition: Composition

    def provenance(self, path: str) -> Provenance:
        """Who set the field at ``path``, and what that overrode."""
        return self.draft.provenance(path)


def prepare(
    *,
    file: ConfigFile = None,
    env: Mapping[str, str] | None = None,
    cli: Mapping[str, Any] | None = None,
    plugins: Mapping[str, object] | None = None,
    **kwargs: Any,
) -> Prepared:
    """Everything from the sources to the chosen parts.

    Args:
        file, env, cli, kwargs: see ``pegboard.config.load_draft``.
        plugins: plugin modules or objects by name, loaded besides the installed ones; mappings in it, and core's own keys
            (``enabled``, ``block`` …), are the configuration's ``plugins`` section.

    Raises ``ConfigError`` with all problems of the configuration and of the plugins that it names; then what ``compose`` raises
    if the parts do not fit together or the model cannot be found.
    """
    checked = check(file=file, env=env, cli=cli, plugins=plugins, **kwargs)
    host, config = checked.host, checked.config
    for warning in host.warnings if host else []:
        logger.warning(warning)
    if checked.problems:
        raise ConfigError(checked.problems) from _cause(host)
    assert host is not None
    assert config is not None
    from pegboard.plugins import compose

    try:
        composition = compose(config, host)
    except ConfigError as error:
        raise ConfigError(_with_winner(checked.draft, problem) for problem in error.problems) from error.__cause__
    for warning in (*_forced(checked.draft), *_idle_sections(config, host)):
        logger.warning(warning)
    return Prepared(config, checked.draft, host, composition)


def check(
    *,
    file: ConfigFile = None,
    env: Mapping[str, str] | None = None,
    cli: Mapping[str, Any] | None = None,
    plugins: Mapping[str, object] | None = None,
    all_sections: bool = False,
    **kwargs: Any,
) -> Checked:
    """Sources, plugins, sections, hooks ``configure`` and ``validate``. Raises nothing: problems are in the result.

    With ``all_sections`` the sections of all loaded plugins are declared, not only of those that are active or set.
    """
    objects, section = _split(plugins or {})
    if section:
        kwargs["plugins"] = section
    draft = load_draft(file=file, env=env, cli=cli, **kwargs)
    settings = _plugin_settings(draft)
    if settings is None:
        return Checked(draft, None, None, tuple(draft.attempt()[1]))
    from pegboard.plugins import PluginHost

    host = PluginHost.inspect(settings, extra=objects)
    problems = [_with_source(draft, problem) for problem in host.problems]
    problems += declare_sections(draft, host, everything=all_sections)
    problems += configure(draft, host)
    problems += part_problems(draft, host)
    config, found = draft.attempt()
    problems = unique([*problems, *found])
    if config is not None and not problems:
        problems = validate(config, draft, host)
    return Checked(draft, host, None if problems else config, tuple(problems))


def _split(plugins: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Plugin objects, and the configuration's section: a mapping is never a plugin."""
    section = {k: v for k, v in plugins.items() if k in PLUGINS_KEYS or isinstance(v, Mapping)}
    return {k: v for k, v in plugins.items() if k not in section}, section


def _plugin_settings(draft: ConfigDraft) -> PluginsConfig | None:
    """What decides which plugins are loaded; None if any of it is wrong."""
    try:
        return PluginsConfig(**{key: draft.get(f"plugins.{key}") for key in PLUGINS_KEYS})
    except ConfigError:
        return None


def _with_source(draft: ConfigDraft, problem: Problem) -> Problem:
    """The host knows which setting is not met, the draft who set it."""
    return _with_winner(draft, problem) if problem.where.removeprefix("plugins.") in PLUGINS_KEYS else problem


def _with_winner(draft: ConfigDraft, problem: Problem) -> Problem:
    winner = draft.winner(problem.where)
    return replace(problem, sources=(str(winner.origin),) if winner else ())


def _forced(draft: ConfigDraft) -> Iterator[str]:
    """Values of the user that a plugin has overridden."""
    for leaf in draft.tree.leaves():
        found = draft.provenance(leaf.path)
        users = [a for a in found.overridden if a.origin.layer > Layer.PLUGIN]
        if found.origin.layer is Layer.FORCED and users and users[0].value != found.value:
            lost = f"{users[0].value!r}, set by {users[0].origin}"
            yield f"plugin {found.origin.source} forces {leaf.path} = {found.value!r} over {lost}"


def _idle_sections(config: EngineConfig, host: PluginHost) -> Iterator[str]:
    """Sections that have no effect, because nothing of their plugin is in use."""
    for name in config.plugins.sections:
        record = host.record(name)
        if record is not None and not record.active:
            remedy = "list it in plugins.enabled, or choose one of its parts"
            yield f"plugins.{name} is set, but {record.label} is not in use; {remedy}"


def _cause(host: PluginHost | None) -> BaseException | None:
    """What a plugin raised, so that a traceback shows it."""
    return next((r.exception for r in host.records if r.exception is not None), None) if host and host.problems else None
