"""The writer of a queue: serves the readers of its own machine through the ring and remote ones over TCP."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any

from pegboard_executor_mp.queue.contract import Closed, Writer
from pegboard_executor_mp.queue.frames import encode
from pegboard_executor_mp.queue.handle import Handle
from pegboard_executor_mp.queue.remote_writer import RemoteWriter
from pegboard_executor_mp.queue.ring_writer import RingWriter


class QueueWriter(Writer):
    """Calls of ``put`` from several threads take turns. A process that was forked off may not use its parent's writer."""

    def __init__(self, ring: RingWriter | None, segment: str | None, local_readers: int, remote: RemoteWriter | None) -> None:
        self._ring = ring
        self._segment = segment
        self._local_readers = local_readers
        self._remote = remote
        self._pid = os.getpid()
        self._turn = threading.RLock()  # which alone knows for sure who holds it, whenever an interrupt comes
        self._unusable = ""
        self._finalizer = weakref.finalize(self, _leave, ring, remote, self._pid)

    def handle(self, reader: int = 0) -> Handle:
        """Local readers are numbered first, remote ones after them."""
        if 0 <= reader < self._local_readers:
            return Handle(reader, segment=self._segment)
        remote_readers = 0 if self._remote is None else self._remote.readers
        if self._remote is None or not 0 <= reader < self._local_readers + remote_readers:
            have = f"the queue has {self._local_readers} local and {remote_readers} remote readers"
            raise ValueError(f"{have}, there is no reader {reader}")
        return Handle(reader, address=self._remote.address, token=self._remote.token, peer_timeout=self._remote.peer_timeout)

    def wait_ready(self, timeout: float | None = None) -> None:
        """Until all readers have attached. Raises ``TimeoutError``, ``Closed``."""
        self._refuse_inside()
        try:
            deadline = self._take_turn(timeout)
            if self._ring is not None:
                self._ring.wait_ready(deadline)
            if self._remote is not None:
                self._remote.wait_ready(deadline)
        finally:
            try:  # noqa: SIM105 - interrupts come after calls: no other one may come before the release
                self._turn.release()
            except RuntimeError:
                pass  # it was not this thread's turn

    def put(self, message: Any, timeout: float | None = None) -> None:
        """Every reader gets ``message``, or none does: raises what pickling it raises, ``TimeoutError`` when a slow reader
        leaves no room in time, ``DeadReader`` when a reader is gone, ``Closed`` when this end was closed or cancelled. Only
        a remote reader lost during the call may leave others with the message."""
        frames = encode(message)
        self._refuse_inside()
        try:
            deadline = self._take_turn(timeout)
            if self._remote is not None:
                self._remote.reserve(frames.total, deadline)
            if self._ring is not None:
                self._ring.put(frames, deadline)
            if self._remote is not None:
                self._remote.send(frames)
        finally:
            try:  # noqa: SIM105 - as above
                self._turn.release()
            except RuntimeError:
                pass

    def cancel(self) -> None:
        """From any thread: a waiting ``put`` or ``wait_ready`` and all later ones raise ``Closed``."""
        self._unusable = self._unusable or "cancelled"
        for end in (self._ring, self._remote):
            if end is not None:
                end.cancel()

    def close(self) -> None:
        """Idempotent. Readers get what was sent before, then ``Closed``."""
        if os.getpid() != self._pid:
            return
        self.cancel()
        if self._turn._is_owned():  # type: ignore[attr-defined]
            return  # a signal's handler inside ``put``, which raises when it goes on; the end comes when this is forgotten
        with self._turn:
            self._unusable = "closed"
            self._finalizer()

    def _refuse_inside(self) -> None:
        """Half a message is in the ring: a second one would go on top of it."""
        if self._turn._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(
                "this thread is writing already; a signal's handler or a finalizer must not write to the same queue"
            )

    def _take_turn(self, timeout: float | None) -> float | None:
        """Hold the lock, which the caller releases whatever happens; the deadline. Raises ``TimeoutError``, ``Closed``."""
        deadline = None
        if timeout is None:
            self._turn.acquire()
        else:
            deadline = time.monotonic() + timeout
            if not self._turn.acquire(timeout=min(max(0.0, timeout), threading.TIMEOUT_MAX)):
                raise TimeoutError(f"another thread was writing for {timeout} s")
        if self._unusable or os.getpid() != self._pid:
            raise Closed(f"the writer was {self._unusable}" if self._unusable else f"the writer belongs to process {self._pid}")
        return deadline


def _leave(ring: RingWriter | None, remote: RemoteWriter | None, pid: int) -> None:
    """Also runs when a writer is forgotten, or the interpreter ends; in a forked child it leaves the parent's alone."""
    if os.getpid() != pid:
        return
    if ring is not None:
        ring.close()
    if remote is not None:
        remote.close()
