"""The default scheduler keeps the scheduler's contract, whatever its policies do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from pegboard.config import EngineConfig
from pegboard.contracts.grammar import GrammarStates
from pegboard.testing.adversaries import ErraticAdmission, ErraticChunking, ErraticPreemption, ErraticQueue
from pegboard.testing.conformance.scheduler import SchedulerConformance
from pegboard.wire import EngineCoreRequest, KVCacheConfig
from pegboard_plugins.scheduling.queues import PriorityQueue
from pegboard_plugins.scheduling.scheduler import DefaultScheduler


class TestDefaultScheduler(SchedulerConformance):
    capabilities = frozenset({"grammars", "prompt_logprobs", "windows"})
    shares_prompts = True

    @pytest.fixture(autouse=True)
    def _standard_parts(self, make_scheduler: Callable[..., DefaultScheduler]) -> None:
        self.make_scheduler = make_scheduler

    def make(
        self,
        config: EngineConfig,
        kv_config: KVCacheConfig,
        parts: Mapping[str, Callable[..., Any]],
        grammars: GrammarStates,
    ) -> DefaultScheduler:
        return self.make_scheduler(config, kv_config, parts, grammars=grammars)

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


class SharesNothing(DefaultScheduler):
    """To it, the members of a group are requests like any others."""

    def add_request(self, request: EngineCoreRequest) -> None:
        super().add_request(msgspec.structs.replace(request, group=None))


class SharesNothingKit(SchedulerConformance):
    capabilities = TestDefaultScheduler.capabilities

    def __init__(self, make_scheduler: Callable[..., DefaultScheduler]) -> None:
        self.make_scheduler = make_scheduler

    def make(
        self,
        config: EngineConfig,
        kv_config: KVCacheConfig,
        parts: Mapping[str, Callable[..., Any]],
        grammars: GrammarStates,
    ) -> DefaultScheduler:
        return self.make_scheduler(config, kv_config, parts, kind=SharesNothing, grammars=grammars)


def test_a_scheduler_need_not_know_groups(make_scheduler: Callable[..., DefaultScheduler]) -> None:
    kit = SharesNothingKit(make_scheduler)
    kit.test_each_answer_to_a_prompt_is_that_of_a_request_of_its_own(9, "prefix", 2)
    kit.test_more_answers_than_slots(2, "paged", 1)
    kit.test_answers_to_one_prompt_in_a_tight_pool("prefix", 3)
    kit.test_members_of_a_group_may_be_aborted_in_every_phase("prefix", 2)
    kit.test_one_answer_of_a_group_may_want_prompt_logprobs("prefix", 2)
    kit.test_answers_of_a_group_go_through_its_grammar_separately(2)
