"""The process that holds the engine breaks, in each way, at each moment: nothing of the engine outlives it.

It cannot hang past a time-out: whoever would have to be told is that process itself.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

SCRIPT = Path(__file__).with_name("holder.py")
MOMENTS = ("boot", "idle", "prefill", "decode")
WHATS = ("SIGKILL", "SIGTERM", "SIGINT", "raise")
FAST = {("decode", "SIGKILL", 2), ("prefill", "SIGINT", 2)}
SOON = 10.0

NothingLeft = Callable[..., None]
Hold = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def hold() -> Iterator[Hold]:
    started: list[subprocess.Popen[str]] = []

    def start(moment: str, what: str, ranks: int = 2) -> subprocess.Popen[str]:
        command = [sys.executable, str(SCRIPT), moment, what, str(ranks)]
        pipe = subprocess.PIPE
        holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        started.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        return holder

    yield start
    for holder in started:
        holder.kill()
        holder.communicate()


def cases() -> list[Any]:
    every = [*itertools.product(MOMENTS, WHATS, (2,)), *itertools.product(("idle", "decode"), WHATS[:3], (1,))]
    slow = pytest.mark.slow
    return [pytest.param(*case, marks=() if case in FAST else slow, id="-".join(map(str, case))) for case in every]


@pytest.mark.parametrize(("moment", "what", "ranks"), cases())
def test_nothing_outlives_the_holder(moment: str, what: str, ranks: int, hold: Hold, nothing_left: NothingLeft) -> None:
    holder = hold(moment, what, ranks)
    others = [process.pid for process in psutil.Process(holder.pid).children(recursive=True)]
    assert len(others) == ranks + 1, "a supervisor and the ranks"
    if what != "raise":
        holder.send_signal(signal.Signals[what])
    _, errors = holder.communicate("\n", timeout=SOON)
    expected = {"SIGKILL": -signal.SIGKILL, "SIGTERM": -signal.SIGTERM, "SIGINT": -signal.SIGINT, "raise": 1}
    assert holder.returncode == expected[what], errors
    if what == "raise":
        assert "RuntimeError: boom-17" in errors
    nothing_left(others, owner=holder.pid)


@pytest.mark.slow
def test_nothing_outlives_the_whole_group(hold: Hold, nothing_left: NothingLeft) -> None:
    """Ended as ``timeout`` or a terminal does it."""
    holder = hold("decode", "")
    others = [process.pid for process in psutil.Process(holder.pid).children(recursive=True)]
    os.killpg(holder.pid, signal.SIGKILL)
    holder.communicate(timeout=SOON)
    nothing_left(others, owner=holder.pid)


@pytest.mark.slow
def test_what_all_processes_leave_when_they_are_killed_at_once_goes_with_the_next_start(
    hold: Hold, nothing_left: NothingLeft, engine: Any
) -> None:
    """As when a container runs out of memory. Nobody is left to clear up."""
    holder = hold("idle", "SIGKILL")
    others = psutil.Process(holder.pid).children(recursive=True)
    for process in (holder, *others):
        os.kill(process.pid, signal.SIGSTOP)
    for process in (*others, holder):
        process.kill()
    holder.wait(SOON)
    folder = f"pegboard-mp-{holder.pid}-"
    assert [name for name in os.listdir("/dev/shm") if name.startswith(folder)]
    engine.open()
    nothing_left([process.pid for process in others], owner=holder.pid)


@pytest.mark.slow
def test_a_process_forked_off_the_holder_keeps_nothing_alive(hold: Hold, nothing_left: NothingLeft) -> None:
    """It has copies of all that the holder has open."""
    holder = hold("idle", "fork")
    children = psutil.Process(holder.pid).children(recursive=True)
    (forked,) = [child for child in children if child.cmdline() == psutil.Process(holder.pid).cmdline()]
    holder.kill()
    holder.wait(SOON)
    try:
        nothing_left([child.pid for child in children if child != forked], owner=holder.pid)
        assert forked.is_running()
    finally:
        forked.kill()
