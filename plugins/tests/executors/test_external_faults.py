"""What happens when a rank fails: every rank is told what, who and where, soon, and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM, SamplingParams
from pegboard.contracts.executor import ExecutorFailed, WorkerError
from pegboard.engine.errors import EngineDeadError
from pegboard.testing.faulty_worker import ROOT_CAUSE, order
from pegboard.testing.ranked_model import RankedPlugin

from .conftest import greedy, open_llm, rank

pytestmark = pytest.mark.slow

LONG = greedy(400)
SOON = 20.0
"""Seconds within which a rank that waits is told; far less than any time-out in here."""


def open_faulty(ranks: int = 2, **executor: Any) -> LLM:
    """Ranks whose workers have no model and do not communicate."""
    settings = {
        "name": "external_launcher",
        "tensor_parallel_size": ranks,
        "worker": "pegboard.testing.faulty_worker:FaultyWorker",
    }
    return LLM("scripted", plugins={"ranked": RankedPlugin()}, executor={**settings, **executor})


def generate(llm: LLM) -> None:
    llm.generate(["one", "two", "three"], LONG)


def cause_of(function: Any, *args: Any) -> tuple[str, str, str]:
    """Type, text and notes of what an engine dies of."""
    try:
        function(*args)
    except EngineDeadError as error:
        return type(error.cause).__name__, str(error.cause), "".join(getattr(error.cause, "__notes__", []))
    return "", "nothing", ""


@pytest.mark.parametrize("at", ["prefill", "decode"])
@pytest.mark.parametrize("lost", [0, 1])
def test_an_error_in_a_step_reaches_all_ranks(launcher: Any, at: str, lost: int) -> None:
    def run() -> Any:
        with open_faulty() as llm:
            return cause_of(generate, llm)

    for kind, text, notes in launcher(2, run, more=order(lost, at, "raise")):
        assert kind == "WorkerError"
        assert text == f"worker rank {lost} failed: RuntimeError: {ROOT_CAUSE}"
        assert "break_down" in notes


def test_an_error_in_the_middle_of_a_forward_frees_ranks_that_wait(launcher: Any, tiny: Path) -> None:
    """Those that hang in a collective for it are told at once, and their threads end."""

    def run(tp: int, pp: int) -> Any:
        import threading

        with open_llm(tiny, tp, pp) as llm:

            def tamper(worker: Any) -> None:
                if worker.world.rank == 1:
                    worker.runner.model.forward = lambda *args: {}["odd-17"]

            llm.collective_rpc(tamper)
            told = cause_of(generate, llm)
        return told, [thread.name for thread in threading.enumerate() if thread.name.startswith("pegboard-")]

    for tp, pp in ((2, 1), (1, 2)):
        for (kind, text, _), threads in launcher(2, run, tp, pp):
            assert (kind, text) == ("WorkerError", "worker rank 1 failed: KeyError: 'odd-17'")
            assert threads == []


@pytest.mark.parametrize("lost", [0, 1])
def test_an_error_at_the_start_reaches_all_ranks(launcher: Any, lost: int) -> None:
    def run() -> Any:
        try:
            open_faulty()
        except WorkerError as error:
            return error.rank, error.error_type, error.message
        return "nothing"

    assert launcher(2, run, more=order(lost, "boot", "raise")) == [(lost, "RuntimeError", ROOT_CAUSE)] * 2
    assert launcher(2, lambda: open_faulty().shutdown()) == [None, None]


def test_a_call_that_fails_leaves_the_engine_alone(launcher: Any) -> None:
    def run() -> Any:
        def odd(worker: Any) -> Any:
            return {}["odd-17"] if worker.world.rank == 1 else (lambda: 5)

        with open_faulty() as llm:
            told = []
            for _ in range(2):
                try:
                    llm.collective_rpc(odd)
                except WorkerError as error:
                    told.append((error.rank, error.error_type, "odd" in error.traceback_text))
            llm.generate("x", SamplingParams(max_tokens=3))
            return told

    assert launcher(2, run) == [[(1, "KeyError", True)] * 2] * 2


def test_a_rank_that_hangs_is_named(launcher: Any) -> None:
    def run() -> Any:
        from pegboard.testing import faulty_worker

        faulty_worker.HANG_SECONDS = 4.0  # type: ignore[misc]
        with open_faulty(3, step_timeout=0.7) as llm:
            return cause_of(generate, llm)

    found = launcher(3, run, more=order(2, "decode", "hang"))
    assert any("executor.step_timeout" in text for _, text, _ in found)
    for kind, text, _ in found:
        assert "no answer from rank 2" in text
        assert kind in ("TimeoutError", "ExecutorFailed"), "whose own time was up, or who heard it from another"


@pytest.mark.parametrize(
    ("number", "lost", "at"), [("SIGKILL", 0, "decode"), ("SIGKILL", 1, "idle"), ("SIGTERM", 0, "idle"), ("SIGTERM", 1, "decode")]
)
def test_a_rank_that_is_killed_is_named(launcher: Any, number: str, lost: int, at: str) -> None:
    def run() -> Any:
        import threading

        with open_faulty() as llm:
            if at == "idle":
                llm.generate("x", SamplingParams(max_tokens=3))
                if rank() == lost:
                    os.kill(os.getpid(), signal.Signals[number])
            told = cause_of(generate, llm)
        return told, [thread.name for thread in threading.enumerate() if thread.name.startswith("pegboard-")]

    found = launcher(2, run, outcomes=True, more=order(lost, "decode", number) if at == "decode" else {})
    assert found[lost].signal == signal.Signals[number]
    (kind, text, _), threads = found[1 - lost].value
    assert kind == "ExecutorFailed"
    assert text.startswith(f"rank {lost} (process ")
    assert text.endswith(" has ended")
    assert threads == []


def test_a_rank_that_is_killed_in_a_collective(launcher: Any, tiny: Path) -> None:
    """Communicators notice too; what is told is the cause."""

    def run() -> Any:
        with open_llm(tiny, 2, 2) as llm:

            def tamper(worker: Any) -> None:
                if worker.world.rank == 1:
                    worker.runner.model.forward = lambda *args: os.kill(os.getpid(), signal.SIGKILL)

            llm.collective_rpc(tamper)
            return cause_of(generate, llm)

    found = launcher(4, run, outcomes=True)
    assert found[1].signal == signal.SIGKILL
    for outcome in found[:1] + found[2:]:
        kind, text, _ = outcome.value
        assert kind == "ExecutorFailed"
        assert "rank 1 (process " in text
        assert text.endswith(" has ended")


def test_a_rank_whose_child_holds_on_to_its_connections(launcher: Any) -> None:
    """A process that was forked off a rank keeps them open when that is killed."""

    def run() -> Any:
        with open_faulty() as llm:
            child = 0
            if rank() == 1 and (child := os.fork()) == 0:
                time.sleep(60)
                os._exit(0)
            executor = llm.engine.client.core.executor  # type: ignore[attr-defined]
            child = executor.gather("the child", child)[1]
            if rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return cause_of(generate, llm)
            finally:
                os.kill(child, signal.SIGKILL)

    found = launcher(2, run, outcomes=True)
    assert found[0].value[0] == "ExecutorFailed"
    assert found[0].value[1].endswith(" has ended")


def test_health_is_asked_of_all_ranks_by_one(launcher: Any) -> None:
    def run() -> Any:
        from pegboard.testing.faulty_worker import FaultyWorker

        def ill(self: Any) -> None:
            if self.world.rank == 1 and self.ill:
                raise ValueError("a fever")

        FaultyWorker.ill, FaultyWorker.check_health = False, ill  # type: ignore[attr-defined,method-assign]
        with open_faulty() as llm:
            executor = llm.engine.client.core.executor  # type: ignore[attr-defined]
            if rank() == 0:
                llm.engine.check_health()
            llm.collective_rpc(lambda worker: setattr(worker, "ill", True))
            told = "nothing"
            if rank() == 0:
                try:
                    executor.check_health()
                except WorkerError as error:
                    told = f"{error.rank} {error.message}"
            executor.gather("the end of the test", None)
            return told

    assert launcher(2, run)[0] == "1 a fever"


def test_failures_are_told_once_to_whoever_registers(launcher: Any) -> None:
    """On the thread that hears the others: a callback may end the executor there."""

    def run() -> Any:
        with open_faulty() as llm:
            executor = llm.engine.client.core.executor  # type: ignore[attr-defined]
            told: list[Any] = []

            def shut_down(cause: BaseException) -> None:
                executor.shutdown()
                told.append("shut down")

            executor.register_failure_callback(lambda cause: 1 / 0)
            executor.register_failure_callback(lambda cause: told.append(type(cause).__name__))
            executor.register_failure_callback(shut_down)
            with pytest.raises(ExecutorFailed, match="rank 0 is at place 0; rank 1 is at place 1"):
                executor.gather(f"place {rank()}", None)
            end = time.monotonic() + SOON
            while len(told) < 2 and time.monotonic() < end:
                time.sleep(0.01)
            executor.register_failure_callback(lambda cause: told.append("late"))
            return told

    assert launcher(2, run) == [["DriftError", "shut down", "late"]] * 2
