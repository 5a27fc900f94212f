"""Signals' handlers that come in the middle of a call and call the same end of a queue."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pegboard.testing.interrupts import interrupt_at
from pegboard.testing.processes import PATIENCE
from pegboard_executor_mp.queue import Closed, MessageQueue, attach, segment
from pegboard_executor_mp.queue.ring import Ring
from pegboard_executor_mp.queue.ring_writer import RingWriter
from pegboard_executor_mp.queue.writer import QueueWriter

OnAlarm = Callable[[Callable[[], object]], None]


@pytest.fixture
def on_alarm() -> Iterator[OnAlarm]:
    """``on_alarm(action)``: soon a signal's handler calls ``action``."""
    before = signal.getsignal(signal.SIGALRM)

    def arm(action: Callable[[], object]) -> None:
        signal.signal(signal.SIGALRM, lambda *_: action())
        signal.setitimer(signal.ITIMER_REAL, 0.2)

    yield arm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=["local", "remote"])
def ends(request: Any) -> Iterator[Any]:
    where: dict[str, Any] = {"num_readers": 1}
    if request.param == "remote":
        where = {"num_readers": 0, "remote_readers": 1, "host": "127.0.0.1"}
    queue = MessageQueue.create(**where, chunk_bytes=1024, num_chunks=2)
    reader = attach(queue.handle())
    queue.wait_ready(PATIENCE)
    yield queue, reader
    reader.close()
    queue.close()


def fill(queue: QueueWriter) -> None:
    with contextlib.suppress(TimeoutError):
        while True:
            queue.put(bytes(900), 0.01)


def test_close_by_a_handler_inside_get(ends: Any, on_alarm: OnAlarm) -> None:
    on_alarm(ends[1].close)
    with pytest.raises(Closed):
        ends[1].get(PATIENCE)


def test_close_by_a_handler_inside_put(ends: Any, on_alarm: OnAlarm) -> None:
    fill(ends[0])
    on_alarm(ends[0].close)
    with pytest.raises(Closed):
        ends[0].put(bytes(900), PATIENCE)


def test_close_by_a_handler_inside_wait_ready(on_alarm: OnAlarm) -> None:
    queue = MessageQueue.create(1, chunk_bytes=1024, num_chunks=2)
    on_alarm(queue.close)
    with pytest.raises(Closed):
        queue.wait_ready(PATIENCE)


def test_put_by_a_handler_inside_put_is_refused(ends: Any, on_alarm: OnAlarm) -> None:
    queue, reader = ends
    fill(queue)
    errors: list[str] = []
    got: list[Any] = []

    def drain() -> None:
        while got[-1:] != ["last"]:
            got.append(reader.get(PATIENCE))

    drainer = threading.Thread(target=drain)

    def put() -> None:
        try:
            queue.put("second", 0.1)
        except RuntimeError as error:
            errors.append(str(error))
        drainer.start()

    on_alarm(put)
    queue.put("last", PATIENCE)
    drainer.join(PATIENCE)
    assert len(errors) == 1
    assert "writing already" in errors[0]
    assert got[-1] == "last"
    assert "second" not in got


def test_an_interrupt_anywhere_in_put_leaves_the_turn_to_others() -> None:
    queue = MessageQueue.create(1, chunk_bytes=1024, num_chunks=8)
    reader = attach(queue.handle())
    for function in (QueueWriter.put, QueueWriter._take_turn, RingWriter.put):
        line = 0
        while interrupt_at(function, line, lambda: queue.put("cut", PATIENCE), never="_turn.release()"):
            line += 1
            other = threading.Thread(target=queue.put, args=("whole", PATIENCE))
            other.start()
            other.join(PATIENCE)
            assert not other.is_alive()
            with contextlib.suppress(TimeoutError):
                while True:
                    reader.get(0)
        assert line > 3
    reader.close()
    queue.close()


def test_an_interrupt_while_a_queue_is_made_leaves_no_name() -> None:
    def names() -> list[str]:
        return [name for name in os.listdir(segment.DIRECTORY) if name.startswith(segment.own_names(segment.PREFIX))]

    for function in (Ring._lay_out, Ring.__init__, RingWriter.__init__):
        before, line = names(), 0
        while interrupt_at(function, line, lambda: MessageQueue.create(1, chunk_bytes=1024, num_chunks=8).close()):
            line += 1
            assert names() == before
        assert line > 3
