"""Explaining a configuration: each field, its value, who set it, and what that overrode."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from pegboard.config.draft import ConfigDraft
from pegboard.config.errors import ConfigError, Problem, describe
from pegboard.config.fields import Leaf
from pegboard.config.placing import unknown_key
from pegboard.config.provenance import DEFAULT, Assignment, Origin

_WIDEST = 40


def select(draft: ConfigDraft, paths: Sequence[str] = ()) -> list[Leaf]:
    """The fields at ``paths`` (fields, sections or short names), or all. Raises ``ConfigError`` for unknown ones."""
    if not paths:
        return list(draft.tree.leaves())
    chosen: dict[str, Leaf] = {}
    problems = []
    for path in paths:
        short = draft.tree.aliases().get(path, [])
        node = draft.tree.find(path) or (draft.tree.find(short[0]) if len(short) == 1 else None)
        if node is None:
            problems.append(unknown_key(draft.tree, path, DEFAULT))
            continue
        for leaf in [node] if isinstance(node, Leaf) else node.leaves():
            chosen[leaf.path] = leaf
    if problems:
        raise ConfigError(problems)
    return list(chosen.values())


def as_text(draft: ConfigDraft, leaves: Iterable[Leaf], verbose: bool = False) -> str:
    """Three columns: field, value, who set it; ``verbose`` adds what was overridden and what the field is for."""
    rows: list[tuple[str, str, str]] = []
    for leaf in leaves:
        ranked = _ranked(draft, leaf)
        rows.append((leaf.path, _text(ranked[0].value) if ranked else "(not set)", _source(ranked[0]) if ranked else "required"))
        if verbose:
            rows += [(f"  {leaf.description}", "", "")] if leaf.description else []
            rows += [("  overrides", _text(a.value), _source(a)) for a in ranked[1:]]
    columns = [r for r in rows if r[1]]
    first = max((len(r[0]) for r in columns), default=0)
    second = min(_WIDEST, max((len(r[1]) for r in columns), default=0))
    return "\n".join(f"{a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in rows)


def as_data(draft: ConfigDraft, leaves: Iterable[Leaf]) -> list[dict[str, Any]]:
    """One mapping per field, plain enough for JSON."""
    fields = []
    for leaf in leaves:
        ranked = _ranked(draft, leaf)
        fields.append(
            {
                "path": leaf.path,
                "value": _plain(ranked[0].value) if ranked else None,
                "origin": _origin(ranked[0].origin) if ranked else None,
                "overridden": [{"value": _plain(a.value), "origin": _origin(a.origin)} for a in ranked[1:]],
                "description": leaf.description,
            }
        )
    return fields


def problem_data(problem: Problem) -> dict[str, Any]:
    """A problem, plain enough for JSON."""
    return {
        "path": problem.where,
        "message": problem.message,
        "remedy": problem.remedy,
        "sources": list(problem.sources),
        "text": describe(problem),
    }


def _ranked(draft: ConfigDraft, leaf: Leaf) -> list[Assignment]:
    found = draft.provenance(leaf.path)
    if leaf.required and not draft.is_set(leaf.path):
        return []
    winner = draft.winner(leaf.path)
    return [winner or Assignment(leaf.path, found.value, found.origin), *found.overridden]


def _source(assignment: Assignment) -> str:
    return f"{assignment.origin}" + ("  (not allowed)" if assignment.problem else "")


def _origin(origin: Origin) -> dict[str, str]:
    return {"layer": origin.layer.name.lower(), "source": origin.source, "key": origin.key, "text": str(origin)}


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _text(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"
