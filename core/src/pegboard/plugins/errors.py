"""Errors of plugin loading and composition. Every message names distribution, version and remedy."""

from __future__ import annotations

from typing import Any


class PluginError(RuntimeError):
    """A plugin cannot be used as asked."""


class DuplicateProviderError(PluginError):
    """Two distributions offer one kind and name."""


class UnknownProviderError(PluginError, LookupError):
    """Nothing offers that name; the message lists what does, and near names."""


class CompositionError(PluginError):
    """The chosen parts do not fit together. ``problems`` lists every conflict."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("the configuration cannot be composed:\n" + "\n".join(f"  - {p}" for p in problems))
        self.problems = problems

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)
