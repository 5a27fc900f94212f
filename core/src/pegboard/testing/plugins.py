"""Plugins made from functions, for tests that need no distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pegboard.plugins.markers import hookimpl


def make_plugin(**hooks: Callable[..., Any]) -> object:
    """A plugin whose hook implementations are these functions: ``make_plugin(validate=lambda config: [...])``."""
    members = {name: staticmethod(hookimpl(function)) for name, function in hooks.items()}
    plugin: object = type("Plugin", (), members)()
    return plugin
