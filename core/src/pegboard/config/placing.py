"""Placing: from what a source gave to assignments of single fields, with each key looked up and each value checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from pegboard.config.allowed import invalid_value
from pegboard.config.errors import Problem, shown
from pegboard.config.fields import PLUGINS, FieldTree, Group, Leaf
from pegboard.config.models import PLUGINS_KEYS
from pegboard.config.names import ENV_PREFIX, did_you_mean, either, env_name, folded, near, question
from pegboard.config.provenance import Assignment, Layer, Origin
from pegboard.config.sources import OTHER_VARIABLES, Given


@dataclass(frozen=True, slots=True)
class Pending:
    """A value for a plugin section that is not declared yet."""

    name: str
    given: Given


@dataclass(frozen=True, slots=True)
class Touched:
    """A section occurs, even if nothing in it is set."""

    path: str
    origin: Origin


Placed = Assignment | Pending | Touched | Problem


@dataclass(frozen=True, slots=True)
class _Value:
    value: Any
    origin: Origin
    text: bool

    def child(self, key: str, value: Any) -> _Value:
        return replace(self, value=value, origin=self.origin.child(key))


def place(tree: FieldTree, given: Given) -> Iterator[Placed]:
    """Assignments, pending sections and problems that follow from ``given``, in its order."""
    path = given.path
    value = _Value(given.value, given.origin, given.text)
    if given.short and len(path) == 1 and tree.root.child(path[0], fold=given.text) is None:
        paths = tree.aliases().get(folded(path[0]) if given.text else path[0], [])
        if len(paths) > 1:
            yield Problem(path[0], f"is ambiguous: it may mean {either(paths)}", "write the full path", (str(given.origin),))
            return
        if paths:
            path = tuple(paths[0].split("."))
    yield from _step(tree, tree.root, path, value)


def _step(tree: FieldTree, node: Group, path: tuple[str, ...], given: _Value) -> Iterator[Placed]:
    """Go from ``node`` along ``path``, then put the value there."""
    key, rest = path[0], path[1:]
    child = node.child(key, fold=given.text)
    if child is None and node is tree.plugins:
        if not rest and not isinstance(given.value, Mapping | BaseModel | str):
            yield _no_section(tree, key, given)
            return
        yield Pending(key, Given((PLUGINS, *path), given.value, given.origin, given.text))
    elif child is None and node.open:
        value = given.value
        for inner in reversed(rest):
            value = {inner: value}
        yield from _put(tree, tree.add_open_leaf(node, key), replace(given, value=value))
    elif child is None:
        yield unknown_key(tree, node.join(".".join(path)), given.origin)
    elif not rest:
        yield from _put(tree, child, given)
    elif isinstance(child, Group):
        yield Touched(child.path, given.origin)
        yield from _step(tree, child, rest, given)
    else:
        yield Problem(child.path, f"holds a value and has no field {'.'.join(rest)!r}", "", (str(given.origin),))


def _put(tree: FieldTree, node: Leaf | Group, given: _Value) -> Iterator[Placed]:
    if isinstance(node, Leaf):
        yield _assign(node, given)
        return
    content = given.value
    if given.text and isinstance(content, str) and content.lstrip().startswith("{"):
        try:
            content = json.loads(content)
        except ValueError as exc:
            yield Problem(node.path, f"{shown(content)} is not valid JSON: {exc}", "", (str(given.origin),))
            return
        given = replace(given, text=False)
    if isinstance(content, BaseModel):
        content = _set_fields(content)
    if isinstance(content, Mapping):
        yield Touched(node.path, given.origin)
        for key, value in content.items():
            yield from _step(tree, node, (str(key),), given.child(str(key), value))
    elif isinstance(content, str) and (principal := node.child(node.principal)):
        yield Touched(node.path, given.origin)
        yield from _put(tree, principal, given)
    else:
        yield _not_a_section(node, given)


def _assign(leaf: Leaf, given: _Value) -> Assignment:
    value = given.value
    try:
        if given.text and isinstance(value, str):
            value = leaf.decode(value)
        return Assignment(leaf.path, leaf.parse(value), given.origin)
    except ValueError as exc:  # pydantic's ValidationError is one
        return Assignment(leaf.path, given.value, given.origin, invalid_value(leaf, value, given.origin, exc))


def _set_fields(model: BaseModel) -> dict[str, Any]:
    """What was set in a section that comes as a model, by key."""
    content = {n: getattr(model, n) for n in type(model).model_fields if n in model.model_fields_set}
    return {**content, **(model.model_extra or {})}


def unknown_key(tree: FieldTree, path: str, origin: Origin) -> Problem:
    """A key that no field has. A variable is named as a variable, anything else as a path."""
    known = [leaf.path for leaf in tree.leaves()] + [name for name, c in tree.root.children.items() if isinstance(c, Group)]
    if origin.layer is Layer.ENVIRONMENT:
        names = {known_path: env_name(known_path) for known_path in known}
        names |= {name.removeprefix(ENV_PREFIX).lower(): name for name in OTHER_VARIABLES}
        meant = [names[found] for found in near(path, names)]
        remedy = question(meant) or "unset it; `pegboard config explain` lists the settings"
        return Problem(origin.source, "this environment variable is no setting of Pegboard", remedy)
    remedy = question(near(path, known)) or "`pegboard config explain` lists the keys"
    sources = () if origin.layer is Layer.DEFAULT else (str(origin),)
    return Problem(path, "unknown key", remedy, sources)


def _no_section(tree: FieldTree, key: str, given: _Value) -> Problem:
    message = f"unknown key; {shown(given.value)} is no table, so it cannot be the section of a plugin either"
    keys = [tree.plugins.join(k) for k in (*sorted(PLUGINS_KEYS), *tree.sections)]
    path = tree.plugins.join(key)
    return Problem(path, message, did_you_mean(path, keys) or f"keys of core: {', '.join(keys)}", (str(given.origin),))


def _not_a_section(node: Group, given: _Value) -> Problem:
    keys = [f"{node.path}.{key}" for key in node.children]
    remedy = f"set {either(keys)}" if keys else ""
    return Problem(node.path, f"is a section with keys of its own, not {shown(given.value)}", remedy, (str(given.origin),))
