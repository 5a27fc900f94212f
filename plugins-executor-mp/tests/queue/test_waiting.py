"""Sleeping, waking, spinning, and telling who is dead."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from pegboard.testing.processes import PATIENCE, children
from pegboard_executor_mp.queue import Closed, DeadReader, MessageQueue, attach, futex, liveness, rhythm
from pegboard_executor_mp.queue.liveness import Process, Watch
from pegboard_executor_mp.queue.rhythm import Rhythm


@pytest.fixture
def sleeper() -> Any:
    """A process that does nothing."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def ends() -> Any:
    queue = MessageQueue.create(1, chunk_bytes=1024, num_chunks=2)
    reader = attach(queue.handle())
    queue.wait_ready(PATIENCE)
    yield queue, reader
    reader.close()
    queue.close()


def test_lost_wake_ups_are_recovered(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex.Word, "wake", lambda self: None)
    queue, reader = ends
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.extend(reader.get(PATIENCE) for _ in range(4)))
    thread.start()
    time.sleep(0.1)
    for number in range(4):  # two find the ring full, and no reader's wake-up
        queue.put((number, bytes(1500)), PATIENCE)
    thread.join(PATIENCE)
    assert [number for number, _ in got] == [0, 1, 2, 3]


def test_cancel_does_not_need_its_wake_up(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex.Word, "wake", lambda self: None)
    _, reader = ends
    raised: list[BaseException] = []

    def get() -> None:
        try:
            reader.get(PATIENCE)
        except Closed as error:
            raised.append(error)

    thread = threading.Thread(target=get)
    thread.start()
    time.sleep(0.1)
    reader.cancel()
    thread.join(PATIENCE)
    assert raised


def test_wait_returns_when_the_word_differs() -> None:
    import ctypes

    word = (ctypes.c_uint32 * 1)(7)
    futex.Word(ctypes.addressof(word)).wait(8, time.monotonic() + PATIENCE)  # 7 is not 8: no sleep
    before = time.monotonic()
    futex.Word(ctypes.addressof(word)).wait(7, before + 0.05)
    assert time.monotonic() >= before + 0.05


def test_other_machines_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex.platform, "machine", lambda: "mips")
    with pytest.raises(OSError, match=r"needs Linux on x86-64 or arm64 \(this is linux on mips\)"):
        MessageQueue.create(1)


# -- rhythm --------------------------------------------------------------------------------------------------------------


def beat(steady: Rhythm, gaps: list[float], start: float = 100.0) -> float:
    for gap in gaps:
        steady.heard(start := start + gap)
    return start


def test_a_steady_beat_is_expected() -> None:
    steady = Rhythm()
    steady.may_spin = True
    last = beat(steady, [0.01] * 20 + [0.5] + [0.01] * 20)  # one late message among them
    plan = steady.plan(last + 0.001)
    assert plan is not None
    start, end = plan
    assert last + 0.0098 < start < last + 0.01 < end < last + 0.0103
    assert steady.plan(last + 0.02) is None  # it is late: do not wait spinning


def test_an_uneven_beat_is_slept_through() -> None:
    uneven = Rhythm()
    uneven.may_spin = True
    last = beat(uneven, [0.001 * (1 + number % 7) for number in range(40)])
    assert uneven.plan(last + 0.0001) is None


def test_spinning_has_a_budget() -> None:
    greedy = Rhythm()
    greedy.may_spin = True
    now, spun = 100.0, 0.0
    for _ in range(2000):
        now += 0.003
        greedy.heard(now)
        plan = greedy.plan(now + 0.001)
        if plan is not None:
            spun += plan[1] - plan[0]
            greedy.spun(plan[1] - plan[0])  # all in vain
    assert spun <= rhythm.SHARE * 2000 * 0.003 + rhythm.CAP


def test_one_core_never_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    alone = Rhythm()
    last = beat(alone, [0.01] * 40)
    assert alone.plan(last + 0.001) is None


# -- liveness ------------------------------------------------------------------------------------------------------------


def test_life_and_death_of_processes(sleeper: Any) -> None:
    assert Process.current().alive()
    stat = liveness._stat(sleeper.pid)
    assert stat is not None
    process = Process(sleeper.pid, stat[1])
    assert process.alive()
    assert not Process(sleeper.pid, stat[1] + 1).alive()  # a later process with the same pid
    watch = Watch()
    watch.add(5, process)
    watch.add(6, Process.current())
    watch.add(7, Process(sleeper.pid, stat[1] + 1))
    assert watch.dead() == {7}
    sleeper.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert not process.alive()
    assert watch.dead() == {5, 7}
    sleeper.wait()
    assert not process.alive()
    late = Watch()
    late.add(1, process)
    assert late.dead() == {1}
    watch.close()
    late.close()


def test_without_pidfds(sleeper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError("a sandbox")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    stat = liveness._stat(sleeper.pid)
    assert stat is not None
    watch = Watch()
    watch.add(3, Process(sleeper.pid, stat[1]))
    assert watch.dead() == set()
    sleeper.kill()
    sleeper.wait()
    assert watch.dead() == {3}
    watch.close()


def test_a_killed_reader_is_named_before_the_ring_is_full() -> None:
    def read(connection: Any) -> None:
        reader = attach(handle)
        while True:
            reader.get(PATIENCE)

    queue = MessageQueue.create(2, num_chunks=100_000, chunk_bytes=64)
    handle = queue.handle(1)
    mine = attach(queue.handle(0))
    with children(read) as (child,):
        queue.wait_ready(PATIENCE)
        child.kill()
        with contextlib.suppress(DeadReader):
            for _ in range(10_000):
                queue.put(1, PATIENCE)
                mine.get(PATIENCE)
                time.sleep(0.001)
        with pytest.raises(DeadReader, match=rf"reader 1 has ended \(process {child.process.pid}\)") as caught:
            queue.put(1, PATIENCE)
        assert caught.value.reader == 1
    queue.close()
    mine.close()


def test_a_stopped_reader_is_not_dead() -> None:
    def read(connection: Any) -> None:
        reader = attach(handle)
        for _ in range(3):
            connection.send(reader.get(PATIENCE))

    queue = MessageQueue.create(1, num_chunks=1, chunk_bytes=64)
    handle = queue.handle()
    with children(read) as (child,):
        queue.wait_ready(PATIENCE)
        os.kill(child.pid, signal.SIGSTOP)
        queue.put(0, PATIENCE)
        with pytest.raises(TimeoutError, match="reader 0 leaves no room"):
            queue.put(1, 0.6)
        os.kill(child.pid, signal.SIGCONT)
        queue.put(1, PATIENCE)
        queue.put(2, PATIENCE)
        assert [child.received() for _ in range(3)] == [0, 1, 2]
        queue.close()
