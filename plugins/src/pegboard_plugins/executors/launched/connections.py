"""Messages among the ranks: whole ones, in the order in which each rank sent them, and word of ranks that are gone.

Nobody ever blocks on sending: what a socket does not take at once is sent by the thread that also reads.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, Protocol

from pegboard_plugins.executors.launched.meeting import Peer

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.5
"""How often we look whether processes of this host have ended. Their connections tell at once, unless a child inherited them."""
_FLUSH_SECONDS: Final = 2.0
"""How long ``close`` tries to get rid of what has not been sent."""
_JOIN_SECONDS: Final = 5.0
_LENGTH: Final = struct.Struct("!Q")
_PIECE: Final = 1 << 18


class Listener(Protocol):
    """Called on the thread of the connections; must not block."""

    def hear(self, rank: int, message: Any) -> None: ...

    def lose(self, rank: int) -> None:
        """Nothing more will come of this rank: its process, host or connection is gone, or it has closed its end."""

    def look(self) -> float | None:
        """Called often; seconds until it wants to be called again, or None where nothing is due."""


class Connections:
    """One rank's connections to all others. ``start`` begins to listen."""

    def __init__(self, peers: Mapping[int, Peer]) -> None:
        self._lines = {rank: _Line(rank, peer) for rank, peer in peers.items()}
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        for line in self._lines.values():
            self._selector.register(line.socket, selectors.EVENT_READ, line)
        self._closing = False
        self._close_by = 0.0
        self._thread: threading.Thread | None = None

    def start(self, listener: Listener) -> None:
        self._thread = threading.Thread(target=self._run, args=(listener,), name="pegboard-peers", daemon=True)
        self._thread.start()

    def send(self, message: Any, to: int | None = None) -> None:
        """To one rank, or to all. What is sent to a rank that is gone is lost."""
        lines = self._lines.values() if to is None else (self._lines[to],)
        if lines:
            body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
            data = _LENGTH.pack(len(body)) + body
            left = [line for line in lines if line.send(data)]
            if left:
                self.wake()

    def wake(self) -> None:
        """Have the thread look now."""
        with contextlib.suppress(OSError):
            self._wake_write.send(b"\0")

    def close(self) -> None:
        """After what has been sent so far. Returns when nothing more will be heard."""
        self._close_by = time.monotonic() + _FLUSH_SECONDS
        self._closing = True
        self.wake()
        if self._thread is None:
            self._release()
        elif self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self, listener: Listener) -> None:
        try:
            next_look = 0.0
            while not self._done():
                now = time.monotonic()
                if now >= next_look:
                    self._look_at_processes(listener)
                    next_look = now + LOOK_SECONDS
                due = listener.look()
                self._turn(listener, max(0.0, min(next_look - now, LOOK_SECONDS if due is None else due)))
        except Exception:
            log.exception("the thread that hears the other ranks has failed")
            for line in self._lines.values():
                self._lose(line, listener)
        finally:
            self._release()

    def _done(self) -> bool:
        if not self._closing:
            return False
        return not any(line.pending for line in self._lines.values()) or time.monotonic() > self._close_by

    def _turn(self, listener: Listener, seconds: float) -> None:
        for line in self._lines.values():
            line.watch(self._selector)
        for key, events in self._selector.select(seconds):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._wake_read.recv(4096)
                continue
            line = key.data
            if events & selectors.EVENT_WRITE:
                line.flush()
            if events & selectors.EVENT_READ:
                for message in line.read():
                    listener.hear(line.rank, message)
                if line.ended:
                    self._lose(line, listener)

    def _look_at_processes(self, listener: Listener) -> None:
        for line in list(self._lines.values()):
            if not line.lost and line.process.has_ended():
                for message in line.read():  # its last words
                    listener.hear(line.rank, message)
                self._lose(line, listener)

    def _lose(self, line: _Line, listener: Listener) -> None:
        if not line.lost:
            line.lost = True
            self._selector.unregister(line.socket)
            line.drop()
            listener.lose(line.rank)

    def _release(self) -> None:
        self._selector.close()
        for line in self._lines.values():
            line.close()
        self._wake_read.close()
        self._wake_write.close()


class _Line:
    """One connection. ``send`` may be called from any thread, the rest from that of the connections."""

    def __init__(self, rank: int, peer: Peer) -> None:
        self.rank, self.socket, self.process = rank, peer.socket, peer.process
        self.ended = self.lost = False
        self._lock = threading.Lock()
        self._outgoing: deque[memoryview] = deque()
        self._incoming = bytearray()
        self._events = selectors.EVENT_READ

    @property
    def pending(self) -> bool:
        return bool(self._outgoing)

    def send(self, data: bytes) -> bool:
        """True where some of it is left for the thread to send."""
        with self._lock:
            if self.lost:
                return False
            self._outgoing.append(memoryview(data))
            if len(self._outgoing) == 1:
                self._push()
            return bool(self._outgoing)

    def flush(self) -> None:
        with self._lock:
            self._push()

    def _push(self) -> None:
        try:
            while self._outgoing:
                sent = self.socket.send(self._outgoing[0])
                self._outgoing[0] = self._outgoing[0][sent:]
                if not self._outgoing[0]:
                    self._outgoing.popleft()
        except BlockingIOError:
            pass
        except OSError:  # whoever reads from it notices
            self._outgoing.clear()

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Also for room to write, where there is something to be written."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        if events != self._events and not self.lost:
            selector.modify(self.socket, events, self)
            self._events = events

    def read(self) -> list[Any]:
        """The messages that are complete."""
        incoming = self._incoming
        try:
            while True:
                piece = self.socket.recv(_PIECE)
                incoming += piece
                if len(piece) < _PIECE:
                    self.ended = self.ended or not piece
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        messages, start = [], 0
        while len(incoming) - start >= _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(incoming, start)[0]
            if len(incoming) < end:
                break
            messages.append(pickle.loads(memoryview(incoming)[start + _LENGTH.size : end]))
            start = end
        del incoming[:start]
        return messages

    def drop(self) -> None:
        with self._lock:
            self._outgoing.clear()

    def close(self) -> None:
        with self._lock:
            self.lost = True
            self._outgoing.clear()
            self.socket.close()
