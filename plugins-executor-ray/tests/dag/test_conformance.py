from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pegboard.contracts.executor import Executor
from pegboard.testing.conformance.executor import ExecutorConformance
from pegboard.testing.conformance.executor_ranks import RanksInProcesses


class RayConformance(ExecutorConformance):
    ranks: dict[str, int]

    @pytest.fixture(autouse=True)
    def _maker(self, make_executor: Callable[..., Any]) -> None:
        self._make = make_executor

    def make(self, *, step_timeout: float | None = None) -> Executor:
        executor: Executor = self._make(**self.ranks, step_timeout=step_timeout)
        return executor

    @pytest.fixture
    def executor(self, shared: Callable[..., Executor]) -> Executor:
        return shared(**self.ranks)


class TestTwoRanks(RanksInProcesses, RayConformance):
    ranks = {"ranks": 2}


@pytest.mark.slow
class TestTwoStages(RayConformance):
    ranks = {"ranks": 1, "pipeline_parallel_size": 2}
