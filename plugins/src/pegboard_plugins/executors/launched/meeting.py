"""How the ranks of one engine find one another: through a store, until each has a connection to every other."""

from __future__ import annotations

import errno
import json
import secrets
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pegboard.contracts.communicator import CommunicatorTimeout
from pegboard.engine.errors import EngineStartError
from pegboard_plugins.communicators.peers import Process
from pegboard_plugins.communicators.rendezvous import Pauses, connect
from pegboard_plugins.executors.launched.place import OPTION, Place

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

TIMEOUT_OPTION: Final = "plugins.standard.launch_timeout"
_HELLO_SECONDS: Final = 5.0
"""How long whoever connects may take to say who it is."""
_LENGTH: Final = struct.Struct("!I")
_LONGEST_HELLO: Final = 4096

_engines: Counter[str] = Counter()
"""Engines that this process has begun to start, by run. All ranks start them in the same order: a number means one engine."""
_served: dict[str, TCPStore] = {}
"""Stores that this process serves, for as long as it runs: another rank may come to the next engine before this one does."""


class Peer(NamedTuple):
    """Another rank, and the connection to it."""

    socket: socket.socket
    process: Process
    hostname: str

    def __str__(self) -> str:
        return f"process {self.process.pid} on {self.hostname}"


def meet(place: Place, timeout: float) -> tuple[dict[int, Peer], str]:
    """Rank to peer, of all other ranks; and the address of this host at which they reach it.

    Every rank listens at an address that it leaves in the store, with two secrets: one for those who come, one for the answer.
    Rank r calls on all ranks before it, then waits for those after it. Raises ``EngineStartError``.
    """
    number = _engines[place.run]
    _engines[place.run] += 1
    if place.size == 1:
        return {}, ""
    deadline = time.monotonic() + timeout
    try:
        store = _open_store(place, number, timeout)
        return _Meeting(place, store, timeout, deadline).hold()
    except (CommunicatorTimeout, RuntimeError) as error:  # torch's store has no more to say than RuntimeError
        if isinstance(error, EngineStartError):
            raise
        raise EngineStartError(
            f"rank {place.rank}: the store at {place.address}, at which ranks meet, cannot be used: {error}; is rank 0 running "
            f"there, and is the address ({OPTION}, or MASTER_ADDR and MASTER_PORT) the same for all?"
        ) from error


def _open_store(place: Place, number: int, timeout: float) -> Store:
    from torch.distributed import PrefixStore

    if place.rank == 0 and not place.is_served:
        store = _served.get(place.address) or _served.setdefault(place.address, _serve(place.address))
    else:
        store = connect(f"tcp://{place.address}", timeout)
    return PrefixStore(f"pegboard/{place.run}.{number}", store)


def _serve(address: str) -> TCPStore:
    """Listens at that address only. Where this very process serves a store there already, such as that of its default process
    group, it is that one."""
    from torch.distributed import TCPStore

    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    shared: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "multi_tenant": True, "timeout": timedelta(minutes=5)}
    try:
        listener = socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        try:
            if error.errno == errno.EADDRINUSE:
                return TCPStore(host, int(port), **shared)
        except RuntimeError:
            pass  # the store of another process, or something else
        raise EngineStartError(
            f"rank 0 cannot listen at {address}, where the ranks are to meet: {error}; rank 0 must run on that host and the port "
            f"be free: set MASTER_ADDR and MASTER_PORT, or {OPTION}='host:port', accordingly on all ranks"
        ) from error
    return TCPStore(host, int(port), master_listen_fd=listener.detach(), **shared)  # it closes the listener


class _Meeting:
    """One rank's part."""

    def __init__(self, place: Place, store: Store, timeout: float, deadline: float) -> None:
        self._place, self._store, self._timeout, self._deadline = place, store, timeout, deadline
        self._welcome, self._answer = secrets.token_hex(16), secrets.token_hex(16)
        self._address = _own_address(place.address)
        self._peers: dict[int, Peer] = {}

    def hold(self) -> tuple[dict[int, Peer], str]:
        rank, size, key = self._place.rank, self._place.size, f"rank{self._place.rank}"
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        try:
            with socket.create_server((self._address, 0), family=family, backlog=socket.SOMAXCONN) as listener:
                record = [self._address, listener.getsockname()[1], self._welcome, self._answer]
                self._store.set(key, json.dumps(record))
                for other in range(rank):
                    self._peers[other] = self._call_on(other)
                self._wait_for(range(rank + 1, size), listener)
        except BaseException:
            for peer in self._peers.values():
                peer.socket.close()
            raise
        finally:
            self._store.delete_key(key)  # everybody who looks for it has come, or does so in vain
        return self._peers, self._address

    def _call_on(self, other: int) -> Peer:
        """What is in the store may be left over from processes that have ended: then look again."""
        pauses = Pauses(self._deadline)
        while True:
            if self._store.check([f"rank{other}"]):
                host, port, welcome, answer = json.loads(self._store.get(f"rank{other}"))
                try:
                    return self._try(host, port, welcome, answer)
                except (OSError, ValueError):
                    pass
            if pauses.over():
                raise self._too_late([other])

    def _try(self, host: str, port: int, welcome: str, answer: str) -> Peer:
        connection = socket.create_connection((host, port), timeout=_HELLO_SECONDS)
        try:
            _say(connection, [welcome, self._place.rank, Process.current(), socket.gethostname()])
            connection.settimeout(max(0.1, self._deadline - time.monotonic()))  # it calls on ranks before it first
            said, _, process, hostname = _hear(connection)
            if said != answer:
                raise ValueError("somebody else listens there")
            return Peer(_prepared(connection), Process(*process), hostname)
        except BaseException:
            connection.close()
            raise

    def _wait_for(self, ranks: Iterable[int], listener: socket.socket) -> None:
        missing = set(ranks)
        while missing:
            listener.settimeout(max(0.0, self._deadline - time.monotonic()) or 1e-3)
            try:
                connection = listener.accept()[0]
            except TimeoutError:
                raise self._too_late(missing) from None
            try:
                connection.settimeout(_HELLO_SECONDS)
                said, rank, process, hostname = _hear(connection)
                if said != self._welcome or rank not in missing:
                    raise ValueError("a stranger")
                _say(connection, [self._answer, self._place.rank, Process.current(), socket.gethostname()])
            except (OSError, ValueError):
                connection.close()
                continue
            missing.remove(rank)
            self._peers[rank] = Peer(_prepared(connection), Process(*process), hostname)

    def _too_late(self, ranks: Iterable[int]) -> EngineStartError:
        numbers = ", ".join(map(str, sorted(ranks)))
        return EngineStartError(
            f"rank {self._place.rank} has waited {self._timeout:g} s ({TIMEOUT_OPTION}) at {self._place.address} for "
            f"rank{'s' * (',' in numbers)} {numbers}, which did not come: it may have failed to start, "
            "have another address, or make other engines before this one; all ranks must run the same script"
        )


def _own_address(master: str) -> str:
    """The address of this host from which the master is reached; its own name often stands for one that others can't reach."""
    host, _, port = master.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineStartError(
            f"{master}, where the ranks are to meet, cannot be reached: {error}; set MASTER_ADDR and MASTER_PORT, or {OPTION}"
        ) from error


def _prepared(connection: socket.socket) -> socket.socket:
    """Messages are small and urgent; a host that vanishes is noticed within some seven seconds."""
    connection.settimeout(None)
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 6_000)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def _say(connection: socket.socket, what: Any) -> None:
    data = json.dumps(what).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _hear(connection: socket.socket) -> Any:
    """Raises ``OSError`` or ``ValueError`` for what no rank says."""
    length = _LENGTH.unpack(_exactly(connection, _LENGTH.size))[0]
    if length > _LONGEST_HELLO:
        raise ValueError("no greeting")
    said = json.loads(_exactly(connection, length))
    if not isinstance(said, list) or len(said) != 4:
        raise ValueError("no greeting")
    return said


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("the connection was closed")
        data += piece
    return data
