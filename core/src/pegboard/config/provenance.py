"""Provenance: who gave a field its value, and which values that overrode."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from pegboard.plugins.provider import Problem


class Layer(enum.IntEnum):
    """Where values come from. A higher layer overrides a lower one."""

    DEFAULT = 0
    PLUGIN = 1
    """Set by a plugin's hook ``configure``: gives way to everything that a user set."""
    FILE = 2
    ENVIRONMENT = 3
    COMMAND_LINE = 4
    KEYWORD = 5
    SCRIPT = 6
    """``ConfigDraft.set`` outside of a hook."""
    FORCED = 7
    """A plugin's ``set(..., force=True)``: overrides the user, and ``explain`` says so."""


@dataclass(frozen=True, slots=True)
class Origin:
    """One source of values. ``source``: file, variable, option, argument or plugin; ``key``: the key inside a file."""

    layer: Layer
    source: str = ""
    key: str = ""

    def __str__(self) -> str:
        match self.layer:
            case Layer.DEFAULT:
                return "default"
            case Layer.FILE:
                return f"file {self.source}" + (f", key {self.key}" if self.key else "")
            case Layer.ENVIRONMENT:
                return f"environment variable {self.source}"
            case Layer.COMMAND_LINE:
                return f"option {self.source}" if self.source.startswith("-") else f"command line argument {self.source}"
            case Layer.KEYWORD:
                return f"keyword argument {self.source}"
            case Layer.PLUGIN:
                return f"plugin {self.source}"
            case Layer.FORCED:
                return f"plugin {self.source} (forced)"
            case _:
                return self.source

    def child(self, key: str) -> Origin:
        """The origin of a value one level further in. A variable or an option has no levels: it stays what was typed."""
        match self.layer:
            case Layer.FILE:
                return Origin(self.layer, self.source, f"{self.key}.{key}" if self.key else key)
            case Layer.KEYWORD:
                return Origin(self.layer, f"{self.source}.{key}")
            case _:
                return self


DEFAULT = Origin(Layer.DEFAULT)


@dataclass(frozen=True, slots=True)
class Assignment:
    """One value that a source gave to a field. ``problem``: why the value cannot be used; ``value`` is then as given."""

    path: str
    value: Any
    origin: Origin
    problem: Problem | None = None


@dataclass(frozen=True, slots=True)
class Provenance:
    """The value in force, who set it, and what it overrode, the nearest first (the default, if there is one, last)."""

    path: str
    value: Any
    origin: Origin
    overridden: tuple[Assignment, ...] = ()

    def __str__(self) -> str:
        return str(self.origin)
