"""JSON Schema of the configuration, with the sections of plugins and the names of parts that can be chosen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from pegboard.config.allowed import allowed
from pegboard.config.fields import FieldTree, Group, Leaf
from pegboard.config.models import EngineConfig, PluginsConfig

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
PartNames = Callable[[str], Iterable[str]]
"""Kind of part to the names that are offered."""


def json_schema(tree: FieldTree, names: PartNames | None = None) -> dict[str, Any]:
    """What a config file may hold. ``names`` gives the choices of fields that name a part, as examples: class paths work too."""
    sections = tree.sections
    models: list[type[BaseModel]] = [EngineConfig, PluginsConfig, *(group.model for group in sections.values())]
    references, document = models_json_schema([(model, "validation") for model in models])
    definitions: dict[str, Any] = document["$defs"]
    plugins = _target(definitions, references[(PluginsConfig, "validation")])
    plugins["additionalProperties"] = False
    for name, group in sections.items():
        plugins["properties"][name] = {**references[(group.model, "validation")]}
    root = dict(_target(definitions, references[(EngineConfig, "validation")]))
    for key, child in tree.root.children.items():
        if isinstance(child, Group):
            _describe(_target(definitions, root["properties"][key]), child, names)
            if child.principal:
                principal = {"type": "string", "description": f"stands for {child.path}.{child.principal}"}
                root["properties"][key] = {"anyOf": [root["properties"][key], principal]}
        else:
            _annotate(root["properties"][key], child, names)
    return {"$schema": DIALECT, **root, "$defs": definitions}


def table(tree: FieldTree, names: PartNames | None = None) -> str:
    """The same for reading: a line per field, then its description."""
    lines = []
    for leaf in tree.leaves():
        default = "required" if leaf.required else f"default {json.dumps(leaf.default, default=str)}"
        lines.append(f"{leaf.path}: {allowed(leaf.schema())}; {default}")
        lines.append(f"    {leaf.description}" if leaf.description else "")
        if (choices := _choices(leaf, names)) is not None:
            lines.append(f"    offered: {', '.join(choices) or 'none'}")
    return "\n".join(line for line in lines if line)


def _target(definitions: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The definition that a property refers to."""
    reference = schema.get("$ref") or schema["allOf"][0]["$ref"]
    found: dict[str, Any] = definitions[reference.removeprefix("#/$defs/")]
    return found


def _describe(definition: dict[str, Any], group: Group, names: PartNames | None) -> None:
    for key, child in group.children.items():
        if isinstance(child, Leaf):
            _annotate(definition["properties"][key], child, names)


def _annotate(schema: dict[str, Any], leaf: Leaf, names: PartNames | None) -> None:
    if leaf.description:
        schema.setdefault("description", leaf.description)
    if choices := _choices(leaf, names):
        (schema["items"] if schema.get("type") == "array" else schema)["examples"] = choices


def _choices(leaf: Leaf, names: PartNames | None) -> list[str] | None:
    if leaf.part is None or names is None:
        return None
    return [*leaf.part.choices, *sorted(names(leaf.part.kind))]
