"""A rank breaks: each of two ranks, in each way, at each moment. Everybody who waits is told, the root cause is named, and
nothing is left. (The fast tests are a sample of the matrix.)"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from pegboard.contracts.executor import ExecutorFailed, WorkerError
from pegboard.engine.errors import EngineDeadError
from pegboard.testing.faulty_worker import ROOT_CAUSE

RANKS = (0, 1)
ENDS = ("SIGKILL", "SIGTERM")
WHATS = (*ENDS, "raise", "hang")
FAST = {
    (1, "SIGKILL", "decode"),
    (0, "SIGTERM", "prefill"),
    (1, "raise", "decode"),
    (0, "hang", "decode"),
    (1, "SIGKILL", "boot"),
}
Breaks = Callable[[int, str, str], None]
NothingLeft = Callable[..., None]


def matrix(*moments: str) -> list[Any]:
    cases = itertools.product(RANKS, WHATS, moments)
    return [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow, id="-".join(map(str, case))) for case in cases]


def check_cause(error: BaseException | None, rank: int, what: str) -> None:
    """The root cause names the rank, and what was done to it."""
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
        assert f"was ended by {what}" in str(error)


@pytest.mark.parametrize(("rank", "what", "moment"), matrix("prefill", "decode"))
def test_in_a_step(
    rank: int,
    what: str,
    moment: str,
    engine: Any,
    breaks: Breaks,
    nothing_left: NothingLeft,
    capfd: pytest.CaptureFixture[str],
) -> None:
    breaks(rank, moment, what)
    engine.open()
    error, others = engine.break_while_generating()
    assert isinstance(error, EngineDeadError)
    check_cause(error.__cause__, rank, what)
    assert all(isinstance(other, (WorkerError, ExecutorFailed)) for other in others)
    with pytest.raises(EngineDeadError):
        engine.generate()
    nothing_left(engine.pids)
    told = capfd.readouterr().err
    if what == "raise":
        assert told.count(f"[rank {rank}] RuntimeError: {ROOT_CAUSE}") == 1
    elif what == "hang":
        assert 'faulty_worker.py", line' in told, "where the hung rank was"


LATER_PHASES = [
    pytest.param(1, "raise", "determine_available_memory", marks=pytest.mark.slow),
    pytest.param(0, "SIGKILL", "initialize_cache", marks=pytest.mark.slow),
    pytest.param(1, "hang", "compile_or_warm_up", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("rank", "what", "moment"), [*matrix("boot"), *LATER_PHASES])
def test_at_boot(rank: int, what: str, moment: str, engine: Any, breaks: Breaks, nothing_left: NothingLeft) -> None:
    breaks(rank, moment, what)
    with pytest.raises((WorkerError, ExecutorFailed, TimeoutError)) as caught:
        engine.open(start_timeout=3.0 if what == "hang" else 60.0)
    if what == "hang":
        phase = "load_model" if moment == "boot" else moment
        assert f"{phase}: no answer from rank {rank} within" in str(caught.value)
        assert "plugins.executor_mp.start_timeout=3.0 s" in str(caught.value)
    else:
        check_cause(caught.value, rank, what)
    nothing_left([])


@pytest.mark.parametrize(("rank", "what"), [pytest.param(r, w, marks=pytest.mark.slow) for r in RANKS for w in ENDS])
def test_idle_ends(rank: int, what: str, engine: Any, nothing_left: NothingLeft) -> None:
    engine.open()
    os.kill(engine.pids[rank], signal.Signals[what])
    nothing_left(engine.pids)
    for _ in range(2):
        with pytest.raises(EngineDeadError) as caught:
            engine.generate()
        check_cause(caught.value.__cause__, rank, what)


@pytest.mark.slow
@pytest.mark.parametrize("rank", RANKS)
def test_idle_raise_ends_the_call_alone(rank: int, engine: Any) -> None:
    llm = engine.open()
    expected = engine.generate()
    with pytest.raises(WorkerError) as caught:
        llm.collective_rpc("break_now", (rank, "raise"))
    check_cause(caught.value, rank, "raise")
    assert engine.generate() == expected


@pytest.mark.slow
@pytest.mark.parametrize("rank", RANKS)
def test_idle_hang(rank: int, engine: Any, nothing_left: NothingLeft) -> None:
    llm = engine.open()
    with pytest.raises(TimeoutError, match=f"break_now: no answer from rank {rank} within 0.3 s"):
        llm.collective_rpc("break_now", (rank, "hang"), timeout=0.3)
    with pytest.raises(EngineDeadError) as caught:
        engine.generate()
    check_cause(caught.value.__cause__, rank, "hang")
    nothing_left(engine.pids)


@pytest.mark.parametrize("moment", ["boot", pytest.param("prefill", marks=pytest.mark.slow), "decode"])
@pytest.mark.parametrize("rank", RANKS)
def test_sigint_is_not_for_ranks(rank: int, moment: str, engine: Any, breaks: Breaks) -> None:
    breaks(rank, moment, "SIGINT")
    engine.open()
    first = engine.generate()
    os.kill(engine.pids[rank], signal.SIGINT)
    assert engine.generate() == first


def test_the_supervisor_ends(engine: Any, nothing_left: NothingLeft) -> None:
    engine.open()
    os.kill(psutil.Process(engine.pids[0]).ppid(), signal.SIGKILL)
    nothing_left(engine.pids)
    with pytest.raises(EngineDeadError, match="supervisor of the ranks"):
        engine.generate()
