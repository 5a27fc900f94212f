"""What plugins have to do with the configuration: their sections, and their hooks ``configure`` and ``validate``.

Each hook is called for one plugin at a time, so that whatever it does or raises is told under the plugin's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from pegboard.config.draft import ConfigDraft
from pegboard.config.errors import ConfigError, Problem
from pegboard.config.models import PLUGINS_KEYS, EngineConfig
from pegboard.config.names import did_you_mean, folded
from pegboard.plugins.errors import PluginError

if TYPE_CHECKING:
    from pegboard.plugins import PluginHost, PluginRecord
    from pegboard.plugins.provider import ConfigSection


def declare_sections(draft: ConfigDraft, host: PluginHost, everything: bool = False) -> list[Problem]:
    """Declare in the draft the sections that plugins offer: those of active plugins, those that a source sets, or all.

    A section that cannot be declared is a problem only if it is set or its plugin is active; one that is set and that nobody
    offers always is.
    """
    activate(draft, host)
    given = {folded(item.name) for item in draft.pending}
    owners: dict[str, PluginRecord] = {}
    problems: list[Problem] = []
    for record in host.records:
        for section in _offered(host, record, problems):
            needed = record.active or folded(section.name) in given
            other = owners.setdefault(section.name, record)
            if not needed and not everything:
                continue
            try:
                if other is not record:
                    raise PluginError(f"{other.label} and {record.label} both offer this section; block one of them")
                draft.declare_section(section.name, _model(section))
            except Exception as exc:  # importing the model runs the plugin's code
                if needed:
                    problems.append(_unusable(record, section, exc))
    reported = {p.where for p in problems}
    return problems + [p for p in _undeclared(draft, host, list(owners)) if p.where not in reported]


def _offered(host: PluginHost, record: PluginRecord, problems: list[Problem]) -> list[ConfigSection]:
    """The sections of one plugin. That an inactive plugin cannot tell them is no problem of this engine."""
    from pegboard.plugins.options import sections_of

    try:
        return sections_of(host, record) if record.loaded else []
    except PluginError as exc:
        if record.active:
            problems.append(Problem("plugins", str(exc)))
        return []


def _unusable(record: PluginRecord, section: ConfigSection, exc: Exception) -> Problem:
    reason = str(exc) if isinstance(exc, PluginError) else f"its model cannot be used: {type(exc).__name__}: {exc}"
    return Problem(f"plugins.{section.name}", f"section of {record.label}: {reason}")


def _model(section: ConfigSection) -> type[BaseModel]:
    from pegboard.plugins.options import model_of

    name = section.name
    if name in PLUGINS_KEYS:
        raise PluginError(f"{name!r} is a key of core, a section needs another name")
    if not name or "." in name:
        raise PluginError(f"the name of a section has no dots and is not empty, got {name!r}")
    model = model_of(section)
    if not isinstance(model, type) or not issubclass(model, BaseModel):
        raise PluginError(f"its model must be a pydantic model class, got {model!r}")
    return model


def _undeclared(draft: ConfigDraft, host: PluginHost, known: list[str]) -> list[Problem]:
    """One problem per section that is set and that no loaded plugin declares; ``known`` are those that are declared."""
    sources: dict[str, list[str]] = {}
    for item in draft.pending:
        sources.setdefault(item.name, []).append(str(item.given.origin))
    keys = [f"plugins.{key}" for key in [*sorted(PLUGINS_KEYS), *known]]
    problems = []
    for name, origins in sources.items():
        reason = host.why_absent(name)
        if not reason:
            record = host.record(name)
            reason = f"{record.label if record else 'the plugin'} takes no options"
        guess = did_you_mean(f"plugins.{name}", keys)
        remedy = f"sections there are: {', '.join(known) or 'none'}" + (f"; {guess}" if guess else "")
        problems.append(Problem(f"plugins.{name}", f"no loaded plugin has this section: {reason}", remedy, tuple(origins)))
    return problems


def activate(draft: ConfigDraft, host: PluginHost) -> None:
    """Let the hooks of those plugins run whose parts the draft names."""

    def get(path: str) -> Any:
        try:
            return draft.get(path)
        except ConfigError:  # its problem is reported with the others
            return None

    host.activate_chosen(get)


def configure(draft: ConfigDraft, host: PluginHost) -> list[Problem]:
    """Run the hook ``configure`` of every active plugin, by name. A part that a plugin chooses may bring further plugins in."""
    problems: list[Problem] = []
    done: set[str] = set()
    while turn := [r for r in host.records if r.loaded and r.active and r.name not in done and "configure" in r.hooks]:
        for record in turn:
            done.add(record.name)
            known = set(draft.problems())
            try:
                host.only(record, "configure", draft=draft.writer(record.name))
            except ConfigError as exc:
                problems += [_of(record, p) for p in exc.problems if p not in known]
            except Exception as exc:
                problems.append(_raised(record, "configure", exc))
        activate(draft, host)
    return problems


def part_problems(draft: ConfigDraft, host: PluginHost) -> list[Problem]:
    """Fields that name a part which nothing offers, or which cannot be used."""
    problems = []
    for leaf in draft.tree.leaves():
        winner = draft.winner(leaf.path)
        if leaf.part is None or winner is None or winner.problem:
            continue
        for name in leaf.part.names(winner.value) if isinstance(winner.value, str) else winner.value or ():
            if name in leaf.part.choices:
                continue
            try:
                host.get(leaf.part.kind, name)
            except PluginError as exc:
                problems.append(Problem(leaf.path, str(exc), sources=(str(winner.origin),)))
    return problems


def validate(config: EngineConfig, draft: ConfigDraft, host: PluginHost) -> list[Problem]:
    """What the hook ``validate`` of every active plugin finds wrong, with who set the field that it names."""
    problems: list[Problem] = []
    for record in host.records:
        if not (record.loaded and record.active and "validate" in record.hooks):
            continue
        try:
            found = host.only(record, "validate", config=config)
        except Exception as exc:
            problems.append(_raised(record, "validate", exc))
            continue
        problems += [_located(record, p, draft) for p in found]
    return problems


def _located(record: PluginRecord, problem: Any, draft: ConfigDraft) -> Problem:
    if not isinstance(problem, Problem):
        return Problem(f"{record.label}, validate", f"must yield Problem objects, but gave {problem!r}")
    winner = draft.winner(problem.where)
    origin = (str(winner.origin),) if winner else ()
    return _of(record, Problem(problem.where, problem.message, problem.remedy, (*problem.sources, *origin)))


def _of(record: PluginRecord, problem: Problem) -> Problem:
    return Problem(problem.where, f"{problem.message}, says {record.label}", problem.remedy, problem.sources)


def _raised(record: PluginRecord, hook: str, exc: Exception) -> Problem:
    return Problem(f"{record.label}, {hook}", f"raised {type(exc).__name__}: {exc}", "its settings, or the plugin, are at fault")
