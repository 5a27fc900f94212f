"""What the scheduler tests share: the standard parts behind a stand-in composition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pegboard.config import EngineConfig
from pegboard.testing.fake_composition import FakeComposition
from pegboard.wire import KVCacheConfig
from pegboard_plugins.kv.paged import PagedAllocator
from pegboard_plugins.kv.prefix import PrefixAllocator
from pegboard_plugins.scheduling.admission import DefaultAdmission
from pegboard_plugins.scheduling.chunking import DefaultChunking
from pegboard_plugins.scheduling.preemption import RecomputePreemption
from pegboard_plugins.scheduling.queues import FCFSQueue
from pegboard_plugins.scheduling.scheduler import DefaultScheduler

Make = Callable[..., DefaultScheduler]


def make_default(
    config: EngineConfig, kv_config: KVCacheConfig, parts: Mapping[str, Callable[..., Any]] | None = None, **kwargs: Any
) -> DefaultScheduler:
    standard = {
        "request_queue": FCFSQueue,
        "admission_policy": DefaultAdmission,
        "chunk_policy": DefaultChunking,
        "preemption_policy": RecomputePreemption,
        "kv_allocator": PagedAllocator if config.kv_cache.allocator == "paged" else PrefixAllocator,
    }
    return DefaultScheduler(config, FakeComposition(config, {**standard, **(parts or {})}), kv_config, **kwargs)


@pytest.fixture(scope="session")
def make_scheduler() -> Make:
    return make_default
