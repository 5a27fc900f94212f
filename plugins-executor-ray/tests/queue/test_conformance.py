from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pegboard.contracts.executor import Executor
from pegboard.testing.conformance.executor import ExecutorConformance
from pegboard.testing.conformance.executor_ranks import RanksInProcesses


@pytest.fixture(scope="class")
def shared() -> Iterator[list[Executor]]:
    made: list[Executor] = []
    yield made
    for executor in made:
        executor.shutdown()


class QueueConformance(ExecutorConformance):
    """Tests of a class share an executor as long as it works: to start one takes seconds."""

    how: dict[str, Any]

    @pytest.fixture(autouse=True)
    def _maker(self, make_executor: Callable[..., Any]) -> None:
        self._make = make_executor

    def make(self, *, step_timeout: float | None = None) -> Executor:
        executor: Executor = self._make(**self.how, step_timeout=step_timeout)
        return executor

    @pytest.fixture
    def executor(self, shared: list[Executor], open_executor: Callable[..., Any]) -> Executor:
        if not shared or shared[-1]._failure.closed:
            shared.append(open_executor(**self.how))
        return shared[-1]


class TestTwoRanks(RanksInProcesses, QueueConformance):
    how = {"ranks": 2, "options": {"resources": {"near": 1}}}


@pytest.mark.slow
class TestTwoNodes(QueueConformance):
    how = {"ranks": 2, "options": {"strategy": "STRICT_SPREAD"}}


@pytest.mark.slow
class TestTwoStages(QueueConformance):
    how = {"ranks": 1, "pipeline_parallel_size": 2}
