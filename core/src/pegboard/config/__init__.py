"""Configuration: one pydantic model, built from defaults, file, environment, command line and keyword arguments."""

from typing import TYPE_CHECKING, Any

from pegboard.config.models import (
    AttentionConfig,
    CompilationConfig,
    EngineConfig,
    ExecutorConfig,
    KVCacheSettings,
    ObservabilityConfig,
    PluginsConfig,
    SamplingConfig,
    SchedulerConfig,
    Section,
    parse_bytes,
)

if TYPE_CHECKING:
    from pegboard.config.arguments import add_config_arguments, cli_layer
    from pegboard.config.draft import ConfigDraft, PluginDraft
    from pegboard.config.errors import ConfigError
    from pegboard.config.load import load_config, load_draft
    from pegboard.config.provenance import Layer, Origin, Provenance

_LATER = {
    "ConfigDraft": "draft",
    "ConfigError": "errors",
    "Layer": "provenance",
    "Origin": "provenance",
    "PluginDraft": "draft",
    "Provenance": "provenance",
    "add_config_arguments": "arguments",
    "cli_layer": "arguments",
    "load_config": "load",
    "load_draft": "load",
}
"""Imported when first asked for: the loading of plugins needs the models, and these need the loading of plugins."""

__all__ = [
    "AttentionConfig",
    "CompilationConfig",
    "ConfigDraft",
    "ConfigError",
    "EngineConfig",
    "ExecutorConfig",
    "KVCacheSettings",
    "Layer",
    "ObservabilityConfig",
    "Origin",
    "PluginDraft",
    "PluginsConfig",
    "Provenance",
    "SamplingConfig",
    "SchedulerConfig",
    "Section",
    "add_config_arguments",
    "cli_layer",
    "load_config",
    "load_draft",
    "parse_bytes",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        import importlib

        return getattr(importlib.import_module(f"pegboard.config.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
