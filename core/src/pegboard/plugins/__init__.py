"""Plugins: markers for authors, providers, and the host that loads and composes them. Imports no plugin and no torch."""

from pegboard.plugins.attention import AttentionChoice, select_attention
from pegboard.plugins.composition import Composition, compose, executor_class
from pegboard.plugins.errors import CompositionError, DuplicateProviderError, PluginError, UnknownProviderError
from pegboard.plugins.host import PluginHost
from pegboard.plugins.lifecycle import WorkerContext
from pegboard.plugins.manifest import PluginManifest
from pegboard.plugins.markers import hookimpl, hookspec
from pegboard.plugins.provider import (
    KINDS,
    AdmissionPolicyProvider,
    AttentionBackendProvider,
    ChunkPolicyProvider,
    CliCommand,
    ConfigSection,
    EventSinkProvider,
    ExecutorProvider,
    KVAllocatorProvider,
    ModelProvider,
    PlatformProvider,
    PreemptionPolicyProvider,
    Problem,
    Provider,
    RequestQueueProvider,
    SamplerProvider,
    SchedulerProvider,
    StatLoggerProvider,
    TokenizerProvider,
    WeightLoaderProvider,
    WorkerExtensionProvider,
    WorkerProvider,
)
from pegboard.plugins.record import PluginRecord, PluginStatus

__all__ = [
    "KINDS",
    "AdmissionPolicyProvider",
    "AttentionBackendProvider",
    "AttentionChoice",
    "ChunkPolicyProvider",
    "CliCommand",
    "Composition",
    "CompositionError",
    "ConfigSection",
    "DuplicateProviderError",
    "EventSinkProvider",
    "ExecutorProvider",
    "KVAllocatorProvider",
    "ModelProvider",
    "PlatformProvider",
    "PluginError",
    "PluginHost",
    "PluginManifest",
    "PluginRecord",
    "PluginStatus",
    "PreemptionPolicyProvider",
    "Problem",
    "Provider",
    "RequestQueueProvider",
    "SamplerProvider",
    "SchedulerProvider",
    "StatLoggerProvider",
    "TokenizerProvider",
    "UnknownProviderError",
    "WeightLoaderProvider",
    "WorkerContext",
    "WorkerExtensionProvider",
    "WorkerProvider",
    "compose",
    "executor_class",
    "hookimpl",
    "hookspec",
    "select_attention",
]
