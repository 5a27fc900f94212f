"""The standard admission, chunk and preemption policies."""

from __future__ import annotations

from pegboard.config import EngineConfig, SchedulerConfig
from pegboard.contracts.admission_policy import Admit
from pegboard.contracts.preemption_policy import BlockNeed
from pegboard.contracts.views import RequestView, SchedulingView
from pegboard.testing.conformance.admission_policy import AdmissionPolicyConformance
from pegboard.testing.conformance.chunk_policy import ChunkPolicyConformance
from pegboard.testing.conformance.preemption_policy import PreemptionPolicyConformance
from pegboard_plugins.scheduling.admission import DefaultAdmission
from pegboard_plugins.scheduling.chunking import DefaultChunking
from pegboard_plugins.scheduling.preemption import RecomputePreemption


def situation(num_running: int = 0, num_blocks: int = 100, budget: int = 64) -> SchedulingView:
    return SchedulingView(1, 0.0, budget, num_running, 1, 64, num_blocks, num_blocks, 16)


class TestDefaultAdmission(AdmissionPolicyConformance):
    def make(self) -> DefaultAdmission:
        return DefaultAdmission()

    def test_it_keeps_a_block_for_each_running_request_and_one_percent(self) -> None:
        request = RequestView("r", 0.0)
        assert self.make().admit(request, situation(num_running=7)) == Admit(reserve_blocks=7)
        assert self.make().admit(request, situation(num_running=7, num_blocks=5000)) == Admit(reserve_blocks=50)


class TestDefaultChunking(ChunkPolicyConformance):
    def make(self) -> DefaultChunking:
        return DefaultChunking()

    def test_without_a_threshold_the_budget_decides(self) -> None:
        assert self.make().chunk_tokens(RequestView("r", 0.0), 500, situation()) is None


class TestChunkingWithAThreshold(ChunkPolicyConformance):
    def make(self) -> DefaultChunking:
        return DefaultChunking(EngineConfig(model="m", scheduler=SchedulerConfig(long_prefill_token_threshold=32)))

    def test_the_threshold_caps_a_long_prompt(self) -> None:
        policy = self.make()
        assert policy.chunk_tokens(RequestView("r", 0.0), 500, situation()) == 32
        assert policy.chunk_tokens(RequestView("r", 0.0), 20, situation()) == 20


class TestRecomputePreemption(PreemptionPolicyConformance):
    def make(self) -> RecomputePreemption:
        return RecomputePreemption()

    def test_the_youngest_gives_way_first(self) -> None:
        candidates = [RequestView(name, 0.0) for name in ("b", "c", "d")]
        assert self.make().victims(BlockNeed("a", 1), candidates, situation()) == ["d", "c", "b"]

    def test_the_least_urgent_gives_way_before_younger_ones(self) -> None:
        candidates = [RequestView("b", 0.0, priority=3), RequestView("c", 0.0), RequestView("d", 0.0)]
        assert self.make().victims(BlockNeed("a", 1), candidates, situation()) == ["b", "d", "c"]
