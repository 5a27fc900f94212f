"""What the scheduler tests share: the standard parts behind a stand-in composition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from pegboard.config import EngineConfig, ExecutorConfig, KVCacheSettings, SchedulerConfig
from pegboard.contracts.event_sink import EventSink
from pegboard.testing.driver import SchedulerDriver
from pegboard.testing.fake_composition import FakeComposition
from pegboard.testing.fake_grammars import FakeGrammars
from pegboard.testing.fakes import FakeRunner, fake_kv_config, hash_model
from pegboard.testing.mirror import MirrorWorker
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
    config: EngineConfig,
    kv_config: KVCacheConfig,
    parts: Mapping[str, Callable[..., Any]] | None = None,
    kind: type[DefaultScheduler] = DefaultScheduler,
    **kwargs: Any,
) -> DefaultScheduler:
    standard = {
        "request_queue": FCFSQueue,
        "admission_policy": DefaultAdmission,
        "chunk_policy": DefaultChunking,
        "preemption_policy": RecomputePreemption,
        "kv_allocator": PagedAllocator if config.kv_cache.allocator == "paged" else PrefixAllocator,
    }
    return kind(config, FakeComposition(config, {**standard, **(parts or {})}), kv_config, **kwargs)


@pytest.fixture(scope="session")
def make_scheduler() -> Make:
    return make_default


@pytest.fixture
def driver_of(make_scheduler: Make) -> Callable[..., SchedulerDriver]:
    """A driver around the default scheduler, for the model ``hash_model(1000)``."""

    def make(
        usable_blocks: int = 100,
        block_size: int = 4,
        *,
        depth: int = 1,
        stages: int = 1,
        parts: Mapping[str, Callable[..., Any]] | None = None,
        sinks: Sequence[EventSink] = (),
        propose: Callable[[Sequence[int]], list[int]] | None = None,
        windows: Sequence[int | None] = (None,),
        allocator: str = "prefix",
        **limits: Any,
    ) -> SchedulerDriver:
        config = EngineConfig(
            model="none",
            max_model_len=4096,
            executor=ExecutorConfig(pipeline_parallel_size=stages),
            scheduler=SchedulerConfig(**limits),
            kv_cache=KVCacheSettings(allocator=allocator, block_size=block_size),
        )
        kv_config = fake_kv_config(usable_blocks + 1, block_size, windows)
        grammars = FakeGrammars(1000)
        scheduler = make_scheduler(config, kv_config, parts, event_sinks=sinks, grammars=grammars)
        mirror = MirrorWorker(
            kv_config,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            keeps_samples=stages == 1,
        )
        shares = windows == (None,)  # a window may have left a prompt behind, which is then computed again
        return SchedulerDriver(scheduler, FakeRunner(mirror, hash_model(1000), propose), depth, True, grammars, shares)

    return make
