"""Many messages, a small ring, readers that are slow, that fail, that give up and try again, that are interrupted."""

from __future__ import annotations

import contextlib
import hashlib
import operator
import os
import random
import signal
import time
from functools import partial
from typing import Any

import pytest

from pegboard.testing.processes import PATIENCE, children
from pegboard_executor_mp.queue import Handle, MessageError, MessageQueue, attach

CHUNK = 1024


class FailsToLoad:
    """Loading it raises ``KeyError``."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return operator.getitem, ({}, f"number {self.number}")


def message(number: int) -> Any:
    rng = random.Random(number)
    blob = rng.randbytes(rng.randint(1, 2 * CHUNK))
    return number, hashlib.sha256(blob).digest(), blob


def check(expected: int, received: Any) -> None:
    number, digest, blob = received
    assert number == expected
    assert hashlib.sha256(blob).digest() == digest


def slow(handle: Handle, count: int, connection: Any) -> None:
    """Sleeps up to 20 ms after one message in a hundred."""
    reader, rng = attach(handle), random.Random(1)
    for number in range(count):
        check(number, reader.get(PATIENCE)) if number % 1000 != 999 else _expect_failure(reader, number)
        if rng.random() < 0.01:
            time.sleep(rng.uniform(0, 0.02))
    finish(reader, connection)


def _expect_failure(reader: Any, number: int) -> None:
    with pytest.raises(MessageError, match=f"number {number}"):
        reader.get(PATIENCE)


def failing(handle: Handle, count: int, connection: Any) -> None:
    """Meets a message in every thousand that it cannot load."""
    reader = attach(handle)
    for number in range(count):
        check(number, reader.get(PATIENCE)) if number % 1000 != 999 else _expect_failure(reader, number)
    finish(reader, connection)


def impatient(handle: Handle, count: int, connection: Any) -> None:
    reader = attach(handle)
    number = timeouts = 0
    while number < count:
        try:
            check(number, reader.get(0.001)) if number % 1000 != 999 else reader.get(0.001)
        except TimeoutError:
            timeouts += 1
            continue
        except MessageError:
            if number % 1000 != 999:
                raise
        number += 1
    assert timeouts
    finish(reader, connection)


class Interrupt(BaseException):
    """Raised by a signal's handler."""


def interrupts(only_in: Any) -> list[int]:
    """From now on a handler raises ``Interrupt`` again and again, wherever ``only_in`` or what it calls happens to be. The
    list grows with each."""
    raised: list[int] = []

    def handler(_: int, frame: Any) -> None:
        while frame is not None:
            if frame.f_code is only_in.__code__:
                raised.append(len(raised))
                raise Interrupt
            frame = frame.f_back

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0003)
    return raised


def interrupted(handle: Handle, count: int, connection: Any) -> None:
    reader = attach(handle)
    raised = interrupts(type(reader).get)
    for number in range(count):
        while True:
            try:
                check(number, reader.get(PATIENCE)) if number % 1000 != 999 else _expect_failure(reader, number)
            except Interrupt:
                continue
            break
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert len(raised) > 100
    finish(reader, connection)


def finish(reader: Any, connection: Any) -> None:
    connection.send("all there")
    before = time.process_time()
    sent = reader.get(2 * PATIENCE)
    connection.send((time.process_time() - before, time.monotonic() - sent))


def send_all(count: int, gap: float, *readers: Any) -> list[float]:
    """Each reader gets ``count`` messages and, after ``gap`` seconds without any, one more. How long that one took to each."""
    queue = MessageQueue.create(len(readers), chunk_bytes=CHUNK, num_chunks=3, first_fragment=2**32 - count // 2)
    runs = [partial(reader, queue.handle(index), count) for index, reader in enumerate(readers)]
    with children(*runs) as started:
        queue.wait_ready(PATIENCE)
        for number in range(count):
            queue.put(FailsToLoad(number) if number % 1000 == 999 else message(number), PATIENCE)
        assert [child.received() for child in started] == ["all there"] * len(readers)
        time.sleep(gap)
        queue.put(time.monotonic(), PATIENCE)
        processor, delays = zip(*[child.received() for child in started], strict=True)
        assert max(processor) < 0.05 + 0.01 * gap, "seconds of CPU while idle"
        queue.close()
    return list(delays)


def test_slow_failing_impatient_and_interrupted_readers() -> None:
    send_all(3000, 1.0, slow, failing, impatient, interrupted)


@pytest.mark.slow
def test_fifty_thousand_messages() -> None:
    send_all(50_000, 1.0, slow, failing, impatient)


@pytest.mark.long
def test_a_message_after_a_long_silence_comes_at_once() -> None:
    for delay in send_all(100, 70.0, slow, failing, impatient, interrupted):
        assert delay < 1.0


def test_on_one_core() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # which children inherit
    try:
        send_all(500, 0.1, failing, impatient)
    finally:
        os.sched_setaffinity(0, cores)


def test_interrupted_reader_loses_nothing() -> None:
    send_all(3000, 0.2, interrupted, failing)


def test_interrupted_writer_loses_nothing() -> None:
    """A message whose put was interrupted may have been sent; it never hurts another one."""

    def read(handle: Handle, connection: Any) -> None:
        reader, got = attach(handle), []
        while (received := reader.get(PATIENCE)) != "end":
            check(received[0], received)
            got.append(received[0])
        connection.send(got)

    queue = MessageQueue.create(2, chunk_bytes=CHUNK, num_chunks=3)
    with children(*(partial(read, queue.handle(index)) for index in range(2))) as started:
        queue.wait_ready(PATIENCE)
        sure = []
        raised = interrupts(type(queue).put)
        for number in range(3000):
            with contextlib.suppress(Interrupt):
                queue.put(message(number), PATIENCE)
                sure.append(number)
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert len(raised) > 100
        queue.put("end", PATIENCE)
        got = [child.received() for child in started]
        assert got[0] == got[1] == sorted(set(got[0]))
        assert set(sure) <= set(got[0])
        queue.close()


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_start_methods(start_method: str) -> None:
    def read(handle: Handle, connection: Any) -> None:
        reader = attach(handle)
        connection.send(sum(reader.get(PATIENCE) for _ in range(100)))
        connection.send(os.getpid())

    queue = MessageQueue.create(2)
    with children(*(partial(read, queue.handle(index)) for index in range(2)), start_method=start_method) as started:
        queue.wait_ready(PATIENCE)
        for number in range(100):
            queue.put(number, PATIENCE)
        assert [child.received() for child in started] == [4950, 4950]
        queue.close()
