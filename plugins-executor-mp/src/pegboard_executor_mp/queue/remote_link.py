"""What both ends of a TCP connection share: the messages between them, socket options, waiting, noticing that a peer is gone.

The writer binds a ZeroMQ ROUTER socket, each remote reader connects a DEALER. All messages have several parts, the first is one
of the kinds below. Nothing that a reader sends is ever unpickled, and all of it is small.

* reader to writer: ``HELLO`` (protocol, index, token), ``ACK`` (how many messages have been read since the start), ``BYE``
* writer to reader: ``REFUSED`` (why), ``MESSAGE`` (number, cut, parts...), ``PROBE``, ``END``

Back-pressure is credit: a writer has at most a window of messages and bytes under way to a reader, or one larger message alone.
ZeroMQ's own thread sends heartbeats, so a process that computes for minutes is not taken for dead, and one that was killed or
whose host is gone is: its connection drops, which ends the queue, as messages in it may be lost.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

HELLO, ACK, BYE = b"hello", b"ack", b"bye"
REFUSED, MESSAGE, PROBE, END = b"no", b"message", b"probe", b"end"

GREETING: Final = struct.Struct("<II")
"""Protocol, index of the reader."""

COUNT: Final = struct.Struct("<Q")
CUT: Final = struct.Struct("<QQI")
"""Number of the message, bytes of the pickle, number of out-of-band buffers."""

_LINGER_MS: Final = 1000
_SMALL: Final = 4096
"""Bytes. No part that a reader sends is larger; a peer that sends more is cut off."""


class Link:
    """A socket with its context, the monitor of its connections and a descriptor that another thread can wake it by."""

    def __init__(self, kind: int, peer_timeout: float, ipv6: bool, small_only: bool = False) -> None:
        self._context = zmq.Context()
        self.socket: Any = self._context.socket(kind)
        self.socket.setsockopt(zmq.IPV6, int(ipv6))
        self.socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self.socket.setsockopt(zmq.SNDHWM, 0)  # credit bounds what is under way
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(peer_timeout * 1000 / 4)))
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(peer_timeout * 1000)))
        if small_only:
            self.socket.setsockopt(zmq.MAXMSGSIZE, _SMALL)
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._monitor: Any = self.socket.get_monitor_socket(events | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        for source in (self.socket, self._monitor, self._wake_fd):
            self._poller.register(source, zmq.POLLIN)
        self.cancelled = False
        self.connected = False
        self.lost = False
        """A connection ended, or could not be made; for whoever acts on it to reset."""

    def wait(self, until: float) -> None:
        """Until something arrived, a connection changed, ``cancel`` was called or the time has come. May return early."""
        self._poller.poll(round(max(0.0, until - time.monotonic()) * 1000))
        self.look_at_connections()

    def look_at_connections(self) -> None:
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = True
            else:
                self.lost = True

    def cancel(self) -> None:
        self.cancelled = True
        with contextlib.suppress(OSError):  # closed meanwhile
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """What was sent goes out, for one second at most."""
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close()
        os.close(self._wake_fd)
        self._context.term()
