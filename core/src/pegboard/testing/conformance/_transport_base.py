"""What the transport kit's parts share: the hooks for a subclass, and waiting in threads."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from pegboard.contracts.transport import Reader, Writer
from pegboard.testing.processes import PATIENCE

SIZES = [0, 1, 100, 4095, 4096, 70_000, 262_144, 1_000_003]
"""Bytes of messages; ``make`` may be given chunks of any size."""


class TransportBase:
    """See ``TransportConformance``."""

    attach: Callable[[Any], Reader]
    """Give it as ``attach = staticmethod(function)``."""

    def make(self, num_readers: int) -> Writer:
        """A writer that holds back when some hundred small messages have not been read."""
        raise NotImplementedError("a subclass gives the transport under test")

    def other_version(self, handle: Any) -> Any:
        """``handle`` as a later version of the transport might write it."""
        return dataclasses.replace(handle, protocol=handle.protocol + 1)

    @pytest.fixture
    def ends(self) -> Iterator[Callable[[int], tuple[Writer, list[Reader]]]]:
        """Makes queues whose two ends are in this process, all attached."""
        with contextlib.ExitStack() as stack:

            def open_ends(num_readers: int = 1) -> tuple[Writer, list[Reader]]:
                writer = self.make(num_readers)
                stack.callback(writer.close)
                readers = [type(self).attach(writer.handle(i)) for i in range(num_readers)]
                for reader in readers:
                    stack.callback(reader.close)
                writer.wait_ready(PATIENCE)
                return writer, readers

            yield open_ends


def put_for_ever(writer: Writer) -> None:
    """Until it raises; readers may be slow."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with contextlib.suppress(TimeoutError):
            writer.put(b"x" * 1000, PATIENCE)
        time.sleep(0.001)


def in_thread(function: Callable[[], Any]) -> Callable[[], Any]:
    """Start it; the returned function waits for it and returns or raises what it did."""
    outcome: Future[Any] = Future()
    threading.Thread(target=_settle, args=(outcome, function), daemon=True).start()
    return lambda: outcome.result(2 * PATIENCE)


def _settle(outcome: Future[Any], function: Callable[[], Any]) -> None:
    try:
        outcome.set_result(function())
    except BaseException as error:
        outcome.set_exception(error)


def while_serving(writer: Writer, function: Callable[[], Any]) -> Any:
    """Some writers answer readers only while they are called."""
    outcome: Future[Any] = Future()
    threading.Thread(target=_settle, args=(outcome, function), daemon=True).start()
    while not outcome.done():
        with contextlib.suppress(TimeoutError):
            writer.wait_ready(0.05)
        time.sleep(0.01)
    return outcome.result()
