"""The reader of a queue whose writer is on another host."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
import weakref
from typing import Any, Final

import zmq

from pegboard_executor_mp.queue.contract import Closed, DeadWriter, HandleRefused, Reader
from pegboard_executor_mp.queue.frames import Payload, parse_table
from pegboard_executor_mp.queue.handle import PROTOCOL, Handle
from pegboard_executor_mp.queue.remote_link import ACK, BYE, COUNT, CUT, END, GREETING, HELLO, MESSAGE, REFUSED, Link

_RECHECK: Final = 1.0
_NEVER_MS: Final = 2**31 - 1


class RemoteReader(Reader):
    """As ``LocalReader``. Whether the writer takes it is known at the first ``get``: attaching does not wait for the writer,
    which answers only while it puts or waits for its readers."""

    def __init__(self, link: Link, handle: Handle) -> None:
        self.index = handle.reader
        self._link = link
        self._pid = os.getpid()
        self._inside = 0  # the thread that is in ``get``
        self._parts: list[Any] = []
        self._held: Payload | None = None
        self._over: Exception | None = None
        """Why nothing more will come."""
        self._read = 0
        self._closed = False
        self._finalizer = weakref.finalize(self, _leave, link, self._pid)

    @classmethod
    def attach(cls, handle: Handle) -> RemoteReader:
        """Raises ``Closed`` when nobody listens at the handle's address."""
        assert handle.address is not None
        link = Link(zmq.DEALER, handle.peer_timeout, ipv6="[" in handle.address)
        try:
            # What was under way when a connection drops is lost, so the queue is over: no second connection. Not -1, with which
            # ZeroMQ drops even what has arrived.
            link.socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
            link.socket.connect(handle.address)
            until = time.monotonic() + handle.peer_timeout
            while not link.connected:
                if link.lost or time.monotonic() >= until:
                    raise Closed(f"no writer can be reached at {handle.address}")
                link.wait(until)
            link.socket.send_multipart([HELLO, GREETING.pack(PROTOCOL, handle.reader), handle.token])
        except BaseException:
            link.close()
            raise
        return cls(link, handle)

    def get(self, timeout: float | None = None) -> Any:
        """See ``LocalReader.get``; also raises ``HandleRefused``."""
        if self._inside:
            raise RuntimeError(f"reader {self.index} is in use by another thread")
        self._inside = threading.get_ident()
        try:
            self._check_usable()
            deadline = None if timeout is None else time.monotonic() + timeout
            while self._held is None:
                self._receive(deadline)
            try:
                message = self._held.load()
            except Exception:
                self._acknowledge()
                self._held, self._read = None, self._read + 1
                raise
            self._acknowledge()
            self._held, self._read = None, self._read + 1
            return message
        finally:
            self._inside = 0

    def cancel(self) -> None:
        """From any thread: a waiting ``get`` and all later ones raise ``Closed``."""
        self._link.cancel()

    def close(self) -> None:
        """Idempotent; a ``get`` that waits in another thread raises ``Closed``."""
        if os.getpid() != self._pid:
            return
        self.cancel()
        while self._inside:
            if self._inside == threading.get_ident():
                return  # a signal's handler inside ``get``, which raises when it goes on; the end comes when this is forgotten
            time.sleep(0.001)
        self._closed = True
        self._finalizer()

    # -- receiving -----------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._closed or self._link.cancelled:
            raise Closed(f"reader {self.index} was {'closed' if self._closed else 'cancelled'}")
        if os.getpid() != self._pid:
            raise Closed(f"reader {self.index} belongs to process {self._pid}; attach to another handle in this one")

    def _receive(self, deadline: float | None) -> None:
        """Act on one message of the writer."""
        self._link.look_at_connections()
        lost = self._link.lost  # looked at before the socket: what arrived before the loss is read first
        if not self._collect_parts():
            if self._over is not None:
                raise self._over
            if lost:
                self._over = DeadWriter("the connection to the writer is lost")
                return
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise TimeoutError("no message came in time")
            self._link.wait(now + _RECHECK if deadline is None else min(now + _RECHECK, deadline))
            self._check_usable()
            return
        parts, self._parts = self._parts, []
        kind = parts[0].bytes
        if kind == MESSAGE:
            self._held = self._payload(parts[1:])
        elif kind == REFUSED:
            self._over = HandleRefused(parts[1].bytes.decode())
        elif kind == END:
            self._over = DeadWriter("the writer closed the queue")

    def _collect_parts(self) -> bool:
        """Whether a whole message is in ``_parts``. What an interrupt left there stays its beginning."""
        while not self._parts or self._parts[-1].more:
            try:
                self._parts.append(self._link.socket.recv(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                return False
        return True

    def _payload(self, parts: list[Any]) -> Payload:
        """Raises ``DeadWriter`` for what is not the next message: a writer that was interrupted while sending."""
        try:
            number, _, num_buffers = CUT.unpack(parts[0].buffer)
            if number != self._read or len(parts) != (2 + num_buffers + (num_buffers > 0)):
                raise ValueError(f"message {number} of {len(parts)} parts came where message {self._read} was due")
            buffers = []
            if num_buffers:
                table = parse_table(parts[1].buffer, num_buffers)
                buffers = [kind(part.buffer) for (_, kind), part in zip(table, parts[3:], strict=True)]
        except (struct.error, ValueError, IndexError) as error:
            self._over = DeadWriter(f"the writer's messages are out of order: {error}")
            raise self._over from error
        return Payload(parts[2 if num_buffers else 1].buffer, buffers)

    def _acknowledge(self) -> None:
        """Give the writer credit for the message that is about to be returned."""
        with contextlib.suppress(zmq.Again):  # nobody is there any more
            self._link.socket.send_multipart([ACK, COUNT.pack(self._read + 1)], zmq.NOBLOCK)


def _leave(link: Link, pid: int) -> None:
    """Also runs when a reader is forgotten, or the interpreter ends; in a forked child it leaves the parent's reader alone."""
    if os.getpid() == pid:
        link.look_at_connections()
        if link.lost:
            link.socket.setsockopt(zmq.LINGER, 0)
        else:
            link.socket.send_multipart([BYE], zmq.NOBLOCK)
        link.close()
