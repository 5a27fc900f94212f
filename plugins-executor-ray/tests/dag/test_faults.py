"""Ranks of an engine break, with real signals: everybody who waits is told soon, the root cause is named, nothing is left. A
sample of what tests/faults does to ranks in processes of the engine's own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from pegboard import LLM, SamplingParams
from pegboard.contracts.executor import ExecutorFailed, WorkerError
from pegboard.engine.errors import EngineDeadError
from pegboard.testing.conformance.executor import PATIENCE, plan
from pegboard.testing.faulty_worker import ROOT_CAUSE, order
from pegboard.testing.ranked_model import RankedPlugin
from pegboard.testing.rpc_worker import RpcWorker

SOON = 10.0
Breaks = Callable[[int, str, str], None]
SLOW = pytest.mark.slow


class Engine:
    """One faulty engine in this process: ``open`` boots it."""

    def __init__(self) -> None:
        self.llm: LLM | None = None
        self.pids: list[int] = []

    def open(self, *, step_timeout: float | None = 1.0, tp: int = 2, pp: int = 1, **options: Any) -> LLM:
        worker = "pegboard.testing.faulty_worker:FaultyWorker"
        ranks = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
        self.llm = LLM(
            "scripted",
            plugins={"ranked": RankedPlugin(), "executor_ray": {"num_cpus": 0.1, **options}},
            executor={"name": "ray", "worker": worker, **ranks, "step_timeout": step_timeout},
            kv_cache={"num_blocks": 256},
            max_model_len=1024,
        )
        self.pids = self.llm.collective_rpc(lambda worker: os.getpid())
        return self.llm

    @property
    def executor(self) -> Any:
        assert self.llm is not None
        return self.llm.engine.client.core.executor  # type: ignore[attr-defined]

    def generate(self, prompts: int = 3) -> list[list[int]]:
        assert self.llm is not None
        params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
        return [list(o.outputs[0].token_ids) for o in self.llm.generate(["same prompt"] * prompts, params)]

    def break_while_generating(self) -> tuple[BaseException, BaseException]:
        """Generate, again and again, while another thread makes calls; what either of them got, which has to come soon."""
        errors: dict[str, BaseException] = {}

        def caught(name: str, work: Callable[[], Any]) -> None:
            try:
                while True:
                    work()
            except BaseException as error:
                errors[name] = error

        calls = {"generate": self.generate, "call": lambda: self.executor.collective_rpc(lambda worker: None)}
        threads = [threading.Thread(target=caught, args=call, daemon=True) for call in calls.items()]
        for thread in threads:
            thread.start()
        end = time.monotonic() + SOON
        for thread in threads:
            thread.join(max(0, end - time.monotonic()))
        assert set(errors) == set(calls), f"nobody told {set(calls) - set(errors)}"
        return errors["generate"], errors["call"]


@pytest.fixture
def engine(nothing_left: Callable[[list[int]], None]) -> Iterator[Engine]:
    engine = Engine()
    yield engine
    if engine.llm is not None:
        engine.llm.shutdown()
    nothing_left(engine.pids)


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> Breaks:
    """``breaks(rank, at, what)``: order a fault of the engine that is opened next."""

    def breaks(rank: int, at: str, what: str) -> None:
        for name, value in order(rank, at, what).items():
            monkeypatch.setenv(name, value)

    return breaks


def check_cause(error: BaseException | None, rank: int, what: str) -> None:
    """The root cause names the rank, and what was done to it as far as Ray knows."""
    if what == "raise":
        assert isinstance(error, WorkerError)
        assert (error.rank, error.message) == (rank, ROOT_CAUSE)
        assert "break_down" in error.traceback_text
    elif what == "hang":
        assert isinstance(error, TimeoutError)
        assert f"executor.step_timeout=1.0 s: no answer from rank {rank}" in str(error)
    else:
        assert isinstance(error, ExecutorFailed)
        assert f"worker rank {rank} (process " in str(error)


@pytest.mark.parametrize(
    ("rank", "what", "moment"),
    [
        (1, "SIGKILL", "decode"),
        pytest.param(0, "SIGTERM", "prefill", marks=SLOW),
        pytest.param(1, "raise", "decode", marks=SLOW),
        (0, "hang", "decode"),
    ],
)
def test_in_a_step(rank: int, what: str, moment: str, engine: Engine, breaks: Breaks, caplog: pytest.LogCaptureFixture) -> None:
    breaks(rank, moment, what)
    engine.open()
    error, other = engine.break_while_generating()
    assert isinstance(error, EngineDeadError)
    check_cause(error.__cause__, rank, what)
    assert isinstance(other, (WorkerError, ExecutorFailed))
    with pytest.raises(EngineDeadError):
        engine.generate()
    if what == "hang":
        told = [record.message for record in caplog.records if f"rank {rank} is stopped in the middle" in record.message]
        assert 'faulty_worker.py", line' in told[0], "where the hung rank was"


@pytest.mark.slow
def test_in_a_stage(engine: Engine, breaks: Breaks) -> None:
    breaks(0, "decode", "SIGKILL")
    engine.open(tp=1, pp=2)
    check_cause(engine.break_while_generating()[0].__cause__, 0, "SIGKILL")


def test_at_boot(engine: Engine, breaks: Breaks) -> None:
    breaks(1, "boot", "SIGKILL")
    with pytest.raises(ExecutorFailed) as caught:
        engine.open()
    check_cause(caught.value, 1, "SIGKILL")


def test_idle_ends(engine: Engine, nothing_left: Callable[[list[int]], None]) -> None:
    engine.open()
    os.kill(engine.pids[0], signal.SIGKILL)
    nothing_left(engine.pids)
    for _ in range(2):
        with pytest.raises(EngineDeadError) as caught:
            engine.generate()
        check_cause(caught.value.__cause__, 0, "SIGKILL")


def test_sigint_is_not_for_ranks(engine: Engine) -> None:
    engine.open()
    first = engine.generate()
    for pid in engine.pids:
        os.kill(pid, signal.SIGINT)
    assert engine.generate() == first


# -- the root cause ----------------------------------------------------------------------------------------------------


class LosesItsPeer(RpcWorker):
    """Rank 1 ends in a step; rank 0 is told of that by its communicator."""

    def execute_model(self, plan: Any) -> Any:
        from pegboard.contracts.communicator import PeerLost

        if self.world.rank == 1:
            os._exit(5)
        raise PeerLost("rank 1 of group tp0 is gone")


def test_the_end_of_a_rank_is_told_before_what_others_make_of_it(make_executor: Any, plugin_with: Any) -> None:
    executor = make_executor(2, worker="own", plugins=plugin_with(LosesItsPeer))
    with pytest.raises(ExecutorFailed, match="worker rank 1 "):
        executor.execute_model(plan(1))


def test_a_graph_torn_down_by_others(make_executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pegboard_executor_ray.dag_fleet.NODE_VERDICT_SECONDS", 0.5)
    executor = make_executor(2)
    causes: list[BaseException] = []
    executor.register_failure_callback(causes.append)
    executor._fleet.requests._compiled.teardown()
    with pytest.raises(ExecutorFailed, match="Ray no longer carries calls to the ranks"):
        executor.execute_model(plan(1))
    executor.shutdown()
    assert len(causes) == 1
    with pytest.raises(ExecutorFailed, match="Ray no longer carries calls"):
        executor.check_health()


def test_ray_is_shut_down_under_the_engine(make_executor: Any, two_nodes: Any) -> None:
    executor = make_executor(2)
    step = executor.execute_model(plan(1, sleep=1.0), non_block=True)
    ray.shutdown()
    try:
        with pytest.raises(ExecutorFailed):
            step.result(PATIENCE)
        with pytest.raises(ExecutorFailed):
            executor.check_health()
        executor.shutdown()
        assert not ray.is_initialized(), "nothing starts another one"
    finally:
        ray.init(address=two_nodes.address, logging_level="warning", ignore_reinit_error=True)
