"""From a draft's values to an ``EngineConfig``: plugin sections by the plugins' models, then the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from pegboard.config.checks import cross_field_problems
from pegboard.config.errors import Problem, shown
from pegboard.config.fields import PLUGINS, Group, Leaf
from pegboard.config.models import EngineConfig
from pegboard.config.names import env_name, flag_name

if TYPE_CHECKING:
    from pegboard.config.draft import ConfigDraft


def assemble(draft: ConfigDraft, complete: bool) -> tuple[EngineConfig | None, list[Problem]]:
    """The configuration that the values in force make, and further problems. ``complete``: all values are allowed ones; if
    not, only what does not depend on the others is checked."""
    problems = [_missing(leaf) for leaf in _core_leaves(draft) if leaf.required and draft.winner(leaf.path) is None]
    sections: dict[str, Any] = _undeclared(draft)
    for name in draft.sections_set:
        section, found = _section(draft, name)
        problems += found
        sections[name] = section
    if problems or not complete:
        return None, problems
    content = _values(draft, draft.tree.root)
    content.setdefault(PLUGINS, {}).update(sections)
    try:
        config = EngineConfig.model_validate(content)
    except ValidationError as exc:
        return None, _translated(draft, exc, "")
    found = [_with_sources(draft, p) for p in cross_field_problems(config)]
    return (None if found else config), found


def _core_leaves(draft: ConfigDraft) -> list[Leaf]:
    sections = draft.tree.sections.values()
    return [leaf for leaf in draft.tree.leaves() if not any(leaf.path.startswith(s.path + ".") for s in sections)]


def _missing(leaf: Leaf) -> Problem:
    remedy = f"give {flag_name(leaf.path)}, {env_name(leaf.path)}, a keyword argument or a key in the config file"
    return Problem(leaf.path, "is required and nothing sets it", remedy)


def _values(draft: ConfigDraft, group: Group) -> dict[str, Any]:
    """What is set in a section, nested. Where a section's default differs from its fields' own, siblings keep that default."""
    content: dict[str, Any] = {}
    for key, child in group.children.items():
        if isinstance(child, Group):
            if child.path not in {s.path for s in draft.tree.sections.values()} and (inner := _values(draft, child)):
                content[key] = inner
        elif (winner := draft.winner(child.path)) is not None:
            content[key] = winner.value
    if content:
        inherited = {k: c.default for k, c in group.children.items() if isinstance(c, Leaf) and c.inherited}
        content = {**inherited, **content}
    return content


def _section(draft: ConfigDraft, name: str) -> tuple[Any, list[Problem]]:
    """A plugin's section, validated by the plugin's model, as plain data."""
    group = draft.tree.sections[name]
    winners = [draft.winner(leaf.path) for leaf in group.leaves()]
    if any(w is not None and w.problem for w in winners):
        return None, []  # reported already, with the field at fault
    required = [_unset(group, leaf, draft) for leaf in group.leaves() if leaf.required and draft.winner(leaf.path) is None]
    if required:
        return None, required
    try:
        section = group.model.model_validate(_values(draft, group))
    except ValidationError as exc:
        return None, _translated(draft, exc, group.path)
    return _plain(group, section)


def _unset(group: Group, leaf: Leaf, draft: ConfigDraft) -> Problem:
    origin = draft.sections_set[group.path.removeprefix(f"{PLUGINS}.")]
    return Problem(leaf.path, f"is required in section {group.path}", f"set {leaf.path}", (str(origin),))


def _plain(group: Group, section: BaseModel) -> tuple[Any, list[Problem]]:
    """The section as JSON would hold it, for other processes; refused if the model cannot be read back from that."""
    remedy = "its model needs fields that JSON can hold, and serializers that its validators can read back"
    try:
        plain = section.model_dump(mode="json", by_alias=True)
        if group.model.model_validate(plain) == section:
            return plain, []
        return None, [Problem(group.path, "the section changes when it is stored and read back", remedy)]
    except (PydanticSerializationError, ValidationError) as exc:
        reason = str(exc).partition("\n")[0]
        return None, [Problem(group.path, f"the section cannot be stored and read back: {reason}", remedy)]


def _undeclared(draft: ConfigDraft) -> dict[str, Any]:
    """Sections that nobody declared, as they were given, higher layers over lower ones."""
    content: dict[str, Any] = {}
    for item in sorted(draft.pending, key=lambda p: p.given.origin.layer):
        node = content
        *parents, last = item.given.path[1:]
        for key in parents:
            node = node.setdefault(key, {})
        _merge(node, last, item.given.value)
    return content


def _merge(into: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(value, Mapping) and isinstance(into.get(key), dict):
        for inner, item in value.items():
            _merge(into[key], inner, item)
    else:
        into[key] = dict(value) if isinstance(value, Mapping) else value


def _translated(draft: ConfigDraft, error: ValidationError, prefix: str) -> list[Problem]:
    """What a model's own validators refuse, with the sources of the fields at fault."""
    problems = []
    for detail in error.errors(include_url=False, include_context=False):
        path = ".".join(filter(None, [prefix, *(str(p) for p in detail["loc"])]))
        message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if detail["loc"] and detail["type"] != "missing":
            message = f"{shown(detail['input'])}: {message}"
        problems.append(_with_sources(draft, Problem(path or "configuration", message)))
    return problems


def _with_sources(draft: ConfigDraft, problem: Problem) -> Problem:
    """With who set the field at fault, or for a whole section who set any of it."""
    node = draft.tree.find(problem.where)
    leaves = [] if node is None else [node] if isinstance(node, Leaf) else list(node.leaves())
    origins = [str(winner.origin) for leaf in leaves if (winner := draft.winner(leaf.path))]
    return Problem(problem.where, problem.message, problem.remedy, tuple(dict.fromkeys((*problem.sources, *origins))))
