"""The writing end for readers on other hosts."""

from __future__ import annotations

import secrets
import socket
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from pegboard_executor_mp.queue.contract import Closed, DeadReader
from pegboard_executor_mp.queue.frames import Frames
from pegboard_executor_mp.queue.handle import PROTOCOL

_RECHECK: Final = 0.25


class _Peer:
    """One remote reader. ``outbox`` holds what was put before it attached."""

    def __init__(self) -> None:
        self.identity: bytes | None = None
        self.outbox: list[list[Any]] = []
        self.under_way: deque[int] = deque()
        """Bytes of each message that it has not yet read."""
        self.bytes_under_way = 0
        self.read = 0
        self.gone: str | None = None


class RemoteWriter:
    """One thread at a time: ``QueueWriter`` sees to that, except for ``cancel``. It acts only while called: ZeroMQ's thread
    does the sending and the heartbeats."""

    def __init__(self, host: str, first: int, readers: int, window_messages: int, window_bytes: int, peer_timeout: float) -> None:
        """``first``: index of the first remote reader. Raises ``OSError`` when ``host`` is no address of this machine."""
        import zmq

        from pegboard_executor_mp.queue.remote_link import Link

        address = _resolve(host)
        self._link = Link(zmq.ROUTER, peer_timeout, ipv6=":" in address, small_only=True)
        try:
            self._link.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a peer that is gone is an error
            self._link.socket.bind(f"tcp://{address if ':' not in address else f'[{address}]'}:*")
        except zmq.ZMQError as error:
            self._link.close()
            raise OSError(error.errno, f"can't listen on host {host!r} ({address}): {error.strerror}") from error
        self.address: str = self._link.socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self.token = secrets.token_bytes(16)
        self.readers = readers
        self.peer_timeout = peer_timeout
        self._first = first
        self._peers = {first + i: _Peer() for i in range(readers)}
        self._by_identity: dict[bytes, int] = {}
        self._window = (window_messages, window_bytes)
        self._sent = 0
        self._suspect_until = 0.0

    def wait_ready(self, deadline: float | None) -> None:
        """Until all remote readers have said hello."""
        while True:
            self._serve()
            missing = [reader for reader, peer in self._peers.items() if peer.identity is None]
            if not missing:
                return
            self._wait(deadline, f"remote readers {missing} have not attached")

    def reserve(self, size: int, deadline: float | None) -> None:
        """Until every reader has credit for ``size`` more bytes."""
        self._serve()
        while slow := [reader for reader, peer in self._peers.items() if not self._has_room(peer, size)]:
            self._wait(deadline, f"remote readers {slow} leave no room")
            self._serve()

    def send(self, frames: Frames) -> None:
        """To all readers, after ``reserve``. Copies: the message may change afterwards. Raises ``DeadReader``."""
        from pegboard_executor_mp.queue.remote_link import CUT, MESSAGE

        parts = [_frozen(part) for part in frames.parts]
        message = [MESSAGE, CUT.pack(self._sent, frames.pickle_bytes, frames.num_buffers), *parts]
        self._sent += 1
        for reader, peer in self._peers.items():
            peer.under_way.append(frames.total)
            peer.bytes_under_way += frames.total
            if peer.identity is None:
                peer.outbox.append(message)
            else:
                self._send(reader, message)
        self._raise_if_gone()

    def cancel(self) -> None:
        self._link.cancel()

    def close(self) -> None:
        from pegboard_executor_mp.queue.remote_link import END

        for reader, peer in self._peers.items():
            if peer.identity is not None and peer.gone is None:
                self._send(reader, [END])
        self._link.close()

    # -- what readers say ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Act on all that has arrived. Raises ``DeadReader``."""
        from pegboard_executor_mp.queue.remote_link import ACK, BYE, COUNT, HELLO, PROBE

        for identity, kind, *body in self._arrived():
            reader = self._by_identity.get(identity)
            if kind == HELLO:
                self._greet(identity, reader, body)
            elif reader is None:
                continue  # not one of ours
            elif kind == ACK:
                self._credit(self._peers[reader], COUNT.unpack(body[0])[0])
            elif kind == BYE:
                self._peers[reader].gone = "closed its end"
        self._link.look_at_connections()
        now = time.monotonic()
        if self._link.lost:  # whose connection it was shows when it is sent something, now or a little later
            self._link.lost = False
            self._suspect_until = now + 1.0
        if now < self._suspect_until:
            for reader, peer in self._peers.items():
                if peer.identity is not None and peer.gone is None:
                    self._send(reader, [PROBE])
        self._raise_if_gone()

    def _arrived(self) -> Iterator[list[bytes]]:
        import zmq

        while True:
            try:
                parts = self._link.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) >= 2:
                yield parts

    def _greet(self, identity: bytes, known_as: int | None, body: list[bytes]) -> None:
        """Who says hello is a reader of this queue, or learns why not."""
        from pegboard_executor_mp.queue.remote_link import GREETING, REFUSED

        protocol = reader = -1
        if len(body) == 2 and len(body[0]) == GREETING.size:
            protocol, reader = GREETING.unpack(body[0])
        peer = self._peers.get(reader)
        why = None
        if protocol != PROTOCOL:
            why = f"the reader has protocol {protocol}, the writer {PROTOCOL}"
        elif not secrets.compare_digest(body[1], self.token) or peer is None:
            why = "the handle is not of this queue"
        elif known_as is not None or peer.identity is not None:
            why = f"reader {reader} is attached already"
        if why is not None or peer is None:
            self._send_to(identity, [REFUSED, (why or "").encode()])
            return
        peer.identity = identity
        self._by_identity[identity] = reader
        for message in peer.outbox:
            self._send(reader, message)
        peer.outbox.clear()

    def _credit(self, peer: _Peer, read: int) -> None:
        for _ in range(min(read - peer.read, len(peer.under_way))):
            peer.bytes_under_way -= peer.under_way.popleft()
        peer.read = max(peer.read, read)

    def _has_room(self, peer: _Peer, size: int) -> bool:
        messages, total = self._window
        return not peer.under_way or (len(peer.under_way) < messages and peer.bytes_under_way + size <= total)

    # -- sending and waiting -------------------------------------------------------------------------------------------

    def _send(self, reader: int, message: list[Any]) -> None:
        peer = self._peers[reader]
        assert peer.identity is not None
        if peer.gone is None and not self._send_to(peer.identity, message):
            peer.gone = "can't be reached any more"

    def _send_to(self, identity: bytes, message: list[Any]) -> bool:
        import zmq

        try:
            self._link.socket.send_multipart([identity, *message], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def _raise_if_gone(self) -> None:
        for reader, peer in self._peers.items():
            if peer.gone is not None:
                raise DeadReader(reader, f"{peer.gone} (over TCP)")

    def _wait(self, deadline: float | None, what: str) -> None:
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            raise TimeoutError(what)
        until = now + (0.02 if now < self._suspect_until else _RECHECK)
        if not self._link.cancelled:
            self._link.wait(until if deadline is None else min(until, deadline))
        if self._link.cancelled:
            raise Closed("the writer was cancelled")


def _frozen(part: Any) -> bytes:
    """``part`` as ``bytes``; those that fill their view are taken as they are."""
    if isinstance(part, memoryview) and isinstance(part.obj, bytes) and part.nbytes == len(part.obj):
        return part.obj
    return bytes(part)


def _resolve(host: str) -> str:
    address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    if address in ("0.0.0.0", "::"):
        raise ValueError(f"host is {host!r}: give an address that the readers can connect to")
    return str(address)
