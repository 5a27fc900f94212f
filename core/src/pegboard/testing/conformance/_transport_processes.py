"""Part of the transport kit: the two ends in processes that live, idle and are killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from pegboard.contracts.transport import Closed, Writer
from pegboard.testing.conformance._transport_base import SIZES, TransportBase, in_thread, put_for_ever
from pegboard.testing.processes import PATIENCE, Child, children


class ProcessCases(TransportBase):
    def children(self, *functions: Callable[[Any], Any]) -> contextlib.AbstractContextManager[list[Child]]:
        """Processes that run the functions."""
        modules = {kind.__module__ for kind in type(self).__mro__} - {"builtins", __name__, TransportBase.__module__}
        return children(*functions, by_value=modules)

    def test_there_and_back_between_processes(self) -> None:
        forth = self.make(2)
        make, attach = self.make, type(self).attach
        handles = [forth.handle(0), forth.handle(1)]

        def echo(index: int, connection: Any) -> None:
            reader, writer = attach(handles[index]), make(1)
            connection.send(writer.handle(0))
            writer.wait_ready(PATIENCE)
            while (message := reader.get(PATIENCE)) is not None:
                writer.put((index, message), PATIENCE)
            writer.close()

        blobs = [random.Random(size).randbytes(size) for size in SIZES * 3]
        with self.children(partial(echo, 0), partial(echo, 1)) as echoes:
            back = [attach(child.received()) for child in echoes]
            forth.wait_ready(PATIENCE)
            for blob in blobs:
                forth.put(blob, PATIENCE)
                for index, reader in enumerate(back):
                    assert reader.get(PATIENCE) == (index, blob)
            forth.put(None, PATIENCE)
            for reader in back:
                with pytest.raises(Closed):
                    reader.get(PATIENCE)
                reader.close()
        forth.close()

    def test_a_killed_reader_ends_the_queue(self) -> None:
        with self.reading_children(2) as (writer, readers):
            writer.put("hello", PATIENCE)
            readers[1].kill()
            with pytest.raises(Closed):
                put_for_ever(writer)

    def test_a_killed_reader_ends_a_waiting_put(self) -> None:
        with self.reading_children(1) as (writer, (child,)):
            os.kill(child.pid, signal.SIGSTOP)
            waiting = in_thread(lambda: put_for_ever(writer))
            time.sleep(0.5)
            child.kill()
            with pytest.raises(Closed):
                waiting()

    @contextlib.contextmanager
    def reading_children(self, num_readers: int) -> Iterator[tuple[Writer, list[Child]]]:
        """A writer, and processes that read from it until they are killed."""
        writer = self.make(num_readers)
        attach = type(self).attach

        def read(handle: Any, _: Any) -> None:
            reader = attach(handle)
            while True:
                reader.get(PATIENCE)

        try:
            with self.children(*(partial(read, writer.handle(i)) for i in range(num_readers))) as readers:
                writer.wait_ready(PATIENCE)
                yield writer, readers
        finally:
            writer.close()

    def test_a_killed_writer_ends_the_queue(self) -> None:
        make = self.make

        def write(connection: Any) -> None:
            writer = make(1)
            connection.send(writer.handle(0))
            writer.wait_ready(PATIENCE)
            for number in range(3):
                writer.put(number, PATIENCE)
            time.sleep(PATIENCE)

        with self.children(write) as (child,):
            reader = type(self).attach(child.received())
            assert [reader.get(PATIENCE) for _ in range(3)] == [0, 1, 2]
            waiting = in_thread(lambda: reader.get(PATIENCE))
            time.sleep(0.1)
            child.kill()
            with pytest.raises(Closed):
                waiting()
            with pytest.raises(Closed):
                reader.get(PATIENCE)
            reader.close()

    def test_an_idle_reader_sleeps(self) -> None:
        writer = self.make(1)
        attach, handle = type(self).attach, writer.handle(0)

        def idle(connection: Any) -> None:
            reader = attach(handle)
            reader.get(PATIENCE)
            before = time.process_time()
            with contextlib.suppress(TimeoutError):
                reader.get(1.0)
            connection.send(time.process_time() - before)

        try:
            with self.children(idle) as (child,):
                writer.wait_ready(PATIENCE)
                writer.put("hello", PATIENCE)
                assert child.received() < 0.1, "seconds of CPU in an idle second"
        finally:
            writer.close()
