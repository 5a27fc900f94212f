from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pegboard.contracts.executor import Executor
from pegboard.testing.conformance.executor import ExecutorConformance
from pegboard.testing.conformance.executor_ranks import RanksInProcesses


class MpConformance(ExecutorConformance):
    ranks = 1

    @pytest.fixture(autouse=True)
    def _maker(self, make_executor: Callable[..., Any]) -> None:
        self._make = make_executor

    def make(self, *, step_timeout: float | None = None) -> Executor:
        executor: Executor = self._make(self.ranks, step_timeout=step_timeout)
        return executor


@pytest.mark.slow
class TestOneRank(MpConformance):
    pass


class TestTwoRanks(RanksInProcesses, MpConformance):
    ranks = 2


@pytest.mark.slow
class TestThreeRanks(MpConformance):
    ranks = 3
