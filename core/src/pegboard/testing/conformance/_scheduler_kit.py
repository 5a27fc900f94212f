"""SchedulerKit: makes the scheduler under test, with a driver and a fake runner around it."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from pegboard.config import EngineConfig, KVCacheSettings, SchedulerConfig
from pegboard.contracts.grammar import GrammarStates
from pegboard.contracts.scheduler import Scheduler
from pegboard.testing.driver import SchedulerDriver, expected_output
from pegboard.testing.fake_grammars import FakeGrammars
from pegboard.testing.fakes import FakeRunner, fake_kv_config, hash_model
from pegboard.testing.mirror import MirrorWorker
from pegboard.wire import EngineCoreRequest, KVCacheConfig

VOCAB_SIZE = 1000
MODEL = hash_model(VOCAB_SIZE)
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
CACHES = pytest.mark.parametrize("allocator", ["paged", "prefix"])


class SchedulerKit(abc.ABC):
    parts: Mapping[str, Callable[..., Any]] = {}
    """Kinds to parts that ``make`` may use in place of its own; the state machine fills it with ``adversaries(seed)``."""
    capabilities: frozenset[str] = frozenset()
    """Those of the scheduler's provider; "grammars", "prompt_logprobs" and "windows" have cases of their own."""
    shares_prompts = False
    """Members of a group must not compute a prompt that another one in the batch has."""

    @abc.abstractmethod
    def make(
        self,
        config: EngineConfig,
        kv_config: KVCacheConfig,
        parts: Mapping[str, Callable[..., Any]],
        grammars: GrammarStates,
    ) -> Scheduler:
        """A scheduler for ``config``. ``config.kv_cache.allocator`` says "paged" (no prefix caching) or "prefix". ``grammars`` is
        of use with that capability."""

    def adversaries(self, seed: int) -> Mapping[str, Callable[..., Any]]:
        """Parts that misbehave, for the state machine; none where the scheduler has no policies."""
        return {}

    def driver(
        self,
        usable_blocks: int = 120,
        block_size: int = 16,
        *,
        depth: int = 1,
        allocator: str = "prefix",
        max_model_len: int = 4096,
        model: Any = MODEL,
        vocab_size: int = VOCAB_SIZE,
        parts: Mapping[str, Callable[..., Any]] | None = None,
        check: bool = True,
        windows: Sequence[int | None] = (None,),
        **limits: Any,
    ) -> SchedulerDriver:
        config = EngineConfig(
            model="none",
            max_model_len=max_model_len,
            scheduler=SchedulerConfig(**limits),
            kv_cache=KVCacheSettings(allocator=allocator, block_size=block_size),
        )
        kv_config = fake_kv_config(usable_blocks + 1, block_size, windows)
        grammars = FakeGrammars(vocab_size)
        scheduler = self.make(config, kv_config, self.parts if parts is None else parts, grammars)
        mirror = MirrorWorker(
            kv_config,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        )
        shares = self.shares_prompts and windows == (None,)  # with windows, prompts that were left behind are computed again
        return SchedulerDriver(scheduler, FakeRunner(mirror, model), depth, check, grammars, shares)

    def assert_right(self, driver: SchedulerDriver, requests: list[EngineCoreRequest]) -> None:
        for request in requests:
            tokens, reason = expected_output(request, driver.runner.next_token)
            assert driver.tokens[request.request_id] == tokens, request.request_id
            assert driver.finished[request.request_id] == reason
        driver.assert_reported(*requests)
        self.assert_idle(driver)

    def assert_idle(self, driver: SchedulerDriver) -> None:
        stats = driver.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
        driver.scheduler.check_integrity()

    def require(self, capability: str) -> None:
        """Skip the rest of a test for a scheduler that does not have ``capability``."""
        if capability not in self.capabilities:
            pytest.skip(f"the scheduler does not say {capability!r}")
