"""Plugins made from functions, for tests that need no distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pegboard.plugins.markers import hookimpl

if TYPE_CHECKING:
    from pegboard.plugins import Composition


def make_plugin(**hooks: Callable[..., Any]) -> object:
    """A plugin whose hook implementations are these functions: ``make_plugin(validate=lambda config: [...])``."""
    members = {name: staticmethod(hookimpl(function)) for name, function in hooks.items()}
    plugin: object = type("Plugin", (), members)()
    return plugin


def compose_with(hooks: dict[str, Callable[..., Any]], *, model: str = "tiny", **settings: Any) -> Composition:
    """The composition of an engine with one plugin, made from ``hooks`` and given directly, which makes it active.
    ``settings`` are fields of ``EngineConfig``."""
    from pegboard.config import EngineConfig
    from pegboard.plugins import PluginHost, compose

    return compose(EngineConfig(model=model, **settings), PluginHost.load(extra={"acme": make_plugin(**hooks)}))
