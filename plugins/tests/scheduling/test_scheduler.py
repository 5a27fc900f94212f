"""The default scheduler keeps the scheduler's contract, whatever its policies do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pegboard.config import EngineConfig
from pegboard.testing.adversaries import ErraticAdmission, ErraticChunking, ErraticPreemption, ErraticQueue
from pegboard.testing.conformance.scheduler import SchedulerConformance
from pegboard.wire import KVCacheConfig
from pegboard_plugins.scheduling.queues import PriorityQueue
from pegboard_plugins.scheduling.scheduler import DefaultScheduler


class TestDefaultScheduler(SchedulerConformance):
    @pytest.fixture(autouse=True)
    def _standard_parts(self, make_scheduler: Callable[..., DefaultScheduler]) -> None:
        self.make_scheduler = make_scheduler

    def make(self, config: EngineConfig, kv_config: KVCacheConfig, parts: Mapping[str, Callable[..., Any]]) -> DefaultScheduler:
        return self.make_scheduler(config, kv_config, parts)

    def adversaries(self, seed: int) -> Mapping[str, Callable[..., Any]]:
        """Some of the policies misbehave, the others are the standard ones."""
        erratic: dict[str, Callable[..., Any]] = {
            "admission_policy": lambda: ErraticAdmission(seed),
            "chunk_policy": lambda: ErraticChunking(seed),
            "preemption_policy": lambda: ErraticPreemption(seed),
            "request_queue": lambda: ErraticQueue(seed),
        }
        return {kind: make for place, (kind, make) in enumerate(erratic.items()) if seed >> place & 1}

    def test_by_priority_against_a_sequential_model(self) -> None:
        self.parts = {"request_queue": PriorityQueue}
        self.test_against_a_sequential_model("prefix")
