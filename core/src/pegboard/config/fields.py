"""The fields of a configuration as a tree: what can be set, under which path, with which type and default.

The tree is derived from the pydantic models, core's and those of plugin sections; paths are dotted (``scheduler.max_num_seqs``).
"""

from __future__ import annotations

import collections.abc
import json
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import BaseModel, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pegboard.config.models import EngineConfig
from pegboard.config.names import folded
from pegboard.config.values import PartName

REQUIRED: Final = PydanticUndefined
"""Default of a field that has none."""
PLUGINS: Final = "plugins"
_NULLS: Final = frozenset({"null", "none"})
_SEQUENCES: Final = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable)


@dataclass(frozen=True, eq=False)
class Leaf:
    """One field that holds a value. ``key`` is its last path segment, ``default`` its default before validation."""

    path: str
    key: str
    info: FieldInfo
    default: Any
    owner: type[BaseModel] | None = None
    inherited: bool = False
    """The default comes from a default of the section that the leaf is in, not from the leaf's own field."""

    @cached_property
    def adapter(self) -> TypeAdapter[Any]:
        annotated: Any = Annotated[self.info.annotation, self.info]
        try:
            return TypeAdapter(annotated, config=self.owner.model_config if self.owner else None)
        except PydanticUserError:  # a type that brings its own configuration takes no other
            return TypeAdapter(annotated)

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    @property
    def description(self) -> str:
        return self.info.description or ""

    @property
    def part(self) -> PartName | None:
        """Set where the value names a part."""
        return next((m for m in self.info.metadata if isinstance(m, PartName)), None)

    @property
    def nullable(self) -> bool:
        return type(None) in _members(self.info.annotation)

    @property
    def is_bool(self) -> bool:
        return bool in _members(self.info.annotation)

    def parse(self, value: Any) -> Any:
        """``value`` as the field's type. Raises pydantic's ``ValidationError``."""
        return self.adapter.validate_python(value)

    def decode(self, text: str) -> Any:
        """What ``text`` from a variable or an option stands for, before validation: null, JSON or a comma-separated list where
        the field's type calls for it, else the text itself. Raises ``ValueError`` for broken JSON."""
        if self.nullable and text.strip().lower() in _NULLS:
            return None
        members = [get_origin(m) or m for m in _members(self.info.annotation)]
        if str in members or Any in members:
            return text
        if text.lstrip()[:1] in ("[", "{") and not all(m in (int, float, bool) for m in members):
            return json.loads(text)
        if any(m in _SEQUENCES for m in members):
            return [item.strip() for item in text.split(",")] if text.strip() else []
        return text

    def default_value(self) -> Any:
        """The default as the field's type, or as written where it is not valid by itself."""
        try:
            return self.parse(self.default)
        except ValidationError:
            return self.default

    def schema(self) -> dict[str, Any]:
        """JSON schema of the value."""
        try:
            return self.adapter.json_schema()
        except (PydanticUserError, PydanticSchemaGenerationError):
            return {"description": str(self.info.annotation)}


@dataclass(eq=False)
class Group:
    """A section: leaves and groups by key. ``open``: it takes keys that it does not declare."""

    path: str
    model: type[BaseModel]
    children: dict[str, Leaf | Group] = field(default_factory=dict)
    open: bool = False

    @property
    def principal(self) -> str:
        """Key of the field that a bare text stands for, or nothing."""
        return getattr(self.model, "principal", "")

    def child(self, key: str, fold: bool = False) -> Leaf | Group | None:
        """The field called ``key``; with ``fold`` in any spelling that counts as the same in text."""
        if key in self.children or not fold:
            return self.children.get(key)
        return next((c for name, c in self.children.items() if folded(name) == folded(key)), None)

    def join(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def leaves(self) -> Iterator[Leaf]:
        for child in self.children.values():
            if isinstance(child, Group):
                yield from child.leaves()
            else:
                yield child


class FieldTree:
    """Core's fields, and under ``plugins`` the sections added with ``add_section``."""

    def __init__(self) -> None:
        base = _core()
        self._base_plugins = base.children[PLUGINS]
        assert isinstance(self._base_plugins, Group)
        self.plugins = Group(PLUGINS, self._base_plugins.model, dict(self._base_plugins.children))
        self.root = Group("", base.model, {**base.children, PLUGINS: self.plugins})

    def add_section(self, name: str, model: type[BaseModel]) -> Group:
        """Declare ``plugins.<name>``."""
        group = build_group(model, f"{PLUGINS}.{name}")
        self.plugins.children[name] = group
        return group

    def add_open_leaf(self, group: Group, key: str) -> Leaf:
        """Declare a field of any type in a section that takes undeclared keys."""
        leaf = Leaf(group.join(key), key, FieldInfo(annotation=Any, description="not declared"), REQUIRED)
        group.children[key] = leaf
        return leaf

    @property
    def sections(self) -> dict[str, Group]:
        """Declared plugin sections by name."""
        return {k: v for k, v in self.plugins.children.items() if isinstance(v, Group)}

    def leaves(self) -> Iterator[Leaf]:
        return self.root.leaves()

    def find(self, path: str) -> Leaf | Group | None:
        """The field or section at a dotted path, exactly spelled."""
        node: Leaf | Group | None = self.root
        for key in path.split("."):
            if not isinstance(node, Group):
                return None
            node = node.child(key)
        return node

    def aliases(self) -> dict[str, list[str]]:
        """Core leaves by their last segment: where there is one path, the segment alone can stand for it."""
        return _aliases()


def build_group(model: type[BaseModel], path: str = "", defaults: BaseModel | None = None) -> Group:
    """The tree of one model. ``defaults``: an instance whose values are the defaults, instead of the fields' own."""
    if not model.__pydantic_complete__:
        model.model_rebuild()
    group = Group(path, model, open=model.model_config.get("extra") == "allow")
    for name, info in model.model_fields.items():
        key = info.validation_alias if isinstance(info.validation_alias, str) else info.alias or name
        default = _default(info) if defaults is None else getattr(defaults, name)
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            instance = default if isinstance(default, inner) else None
            group.children[key] = build_group(inner, group.join(key), instance)
        else:
            group.children[key] = Leaf(group.join(key), key, info, default, model, inherited=_differs(defaults, default, info))
    return group


def _default(info: FieldInfo) -> Any:
    if info.default_factory is not None and getattr(info, "default_factory_takes_validated_data", False):
        return None  # known only once the other fields are
    return info.get_default(call_default_factory=True)


def _differs(defaults: BaseModel | None, default: Any, info: FieldInfo) -> bool:
    return defaults is not None and bool(default != _default(info))


def _members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, ``Annotated`` taken off; a tuple of one for anything else."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    if origin is Union or origin is types.UnionType:
        return tuple(m for arg in get_args(annotation) for m in _members(arg))
    return (annotation,)


@cache
def _core() -> Group:
    group = build_group(EngineConfig)
    plugins = group.children[PLUGINS]
    assert isinstance(plugins, Group)
    plugins.open = False  # its further keys are sections, which are declared one by one
    return group


@cache
def _aliases() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for leaf in _core().leaves():
        found.setdefault(leaf.key, []).append(leaf.path)
    return found
