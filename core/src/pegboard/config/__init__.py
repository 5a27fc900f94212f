"""Configuration: one pydantic model, built from defaults, file, environment, command line and keyword arguments."""

from pegboard.config.models import (
    AttentionConfig,
    EngineConfig,
    ExecutorConfig,
    KVCacheSettings,
    ObservabilityConfig,
    PluginsConfig,
    SamplingConfig,
    SchedulerConfig,
    parse_bytes,
)

__all__ = [
    "AttentionConfig",
    "EngineConfig",
    "ExecutorConfig",
    "KVCacheSettings",
    "ObservabilityConfig",
    "PluginsConfig",
    "SamplingConfig",
    "SchedulerConfig",
    "parse_bytes",
]
