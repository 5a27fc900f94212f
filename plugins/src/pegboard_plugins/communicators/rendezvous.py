"""Where the ranks of a group meet: rank 0 leaves a record, the others find it, and it is gone before anybody goes on.

A record names the process that left it, so that one left over from an earlier group, whose process was killed, is passed over.
"""

from __future__ import annotations

import abc
import datetime
import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pegboard.contracts.communicator import CommunicatorError, CommunicatorTimeout
from pegboard_plugins.communicators.peers import Process

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02
"""Seconds between two looks."""
_LOOPBACK = "127.0.0.1"


class Pauses:
    """Sleeps between looks at something, shorter at first, until a deadline (``time.monotonic``)."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._pause = _FIRST_PAUSE

    def over(self) -> bool:
        """Sleep, and False; or True when time is up."""
        if time.monotonic() >= self.deadline:
            return True
        time.sleep(self._pause)
        self._pause = min(1.5 * self._pause, _LONGEST_PAUSE)
        return False


class Meeting(abc.ABC):
    """One group's place at a rendezvous."""

    @abc.abstractmethod
    def offer(self, record: dict[str, Any]) -> None: ...

    @abc.abstractmethod
    def look(self) -> dict[str, Any] | None: ...

    @abc.abstractmethod
    def withdraw(self) -> None: ...

    @abc.abstractmethod
    def make_store(self, timeout: float) -> tuple[Store, str]:
        """A store for one group, with nothing in it, and how the other ranks open it."""

    @abc.abstractmethod
    def open_store(self, where: str, timeout: float) -> Store: ...

    def find(self, who: str, deadline: float) -> dict[str, Any]:
        """The record of rank 0's living process; ``who`` looks for it."""
        pauses = Pauses(deadline)
        while True:
            record = self.look()
            if record is not None and not Process(*record["process"]).has_ended():
                return record
            if pauses.over():
                raise CommunicatorTimeout(f"{who}: rank 0 has not come to {self} in time")


class FolderMeeting(Meeting):
    """Raises ``CommunicatorError`` when the folder is not there, or not any more."""

    def __init__(self, folder: Path, group: str) -> None:
        self._folder, self._group = folder, group
        self._file = folder / f"{quote(group, safe='')}.json"
        self._check_folder()

    def __str__(self) -> str:
        return str(self._file)

    def offer(self, record: dict[str, Any]) -> None:
        draft = self._file.with_suffix(f".{os.getpid()}")
        try:
            draft.write_text(json.dumps(record))
            draft.replace(self._file)
        except OSError as error:
            raise CommunicatorError(f"group {self._group!r}: cannot write to the rendezvous {self._folder}: {error}") from error

    def look(self) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads(self._file.read_text())
        except FileNotFoundError:
            self._check_folder()
            return None
        return found

    def _check_folder(self) -> None:
        if not self._folder.is_dir():
            raise CommunicatorError(
                f"group {self._group!r}: the rendezvous {str(self._folder)!r} is no folder that this process can see"
            )

    def withdraw(self) -> None:
        self._file.unlink(missing_ok=True)

    def make_store(self, timeout: float) -> tuple[Store, str]:
        """Served by this process, to this host only. (A FileStore's file is now and then left behind.)"""
        store = serve(_LOOPBACK, timeout=timeout)
        return store, rendezvous_of(store)

    def open_store(self, where: str, timeout: float) -> Store:
        return connect(where, timeout)


class StoreMeeting(Meeting):
    def __init__(self, address: str, group: str, timeout: float) -> None:
        self._address, self._group = address, group
        self._store = connect(address, timeout)
        self._key = f"{group}/record"

    def __str__(self) -> str:
        return f"{self._address} ({self._key})"

    def offer(self, record: dict[str, Any]) -> None:
        self._store.set(self._key, json.dumps(record))

    def look(self) -> dict[str, Any] | None:
        if not self._store.check([self._key]):
            return None
        found: dict[str, Any] = json.loads(self._store.get(self._key))
        return found

    def withdraw(self) -> None:
        self._store.delete_key(self._key)

    def make_store(self, timeout: float) -> tuple[Store, str]:
        name = secrets.token_hex(8)
        return self.open_store(name, timeout), name

    def open_store(self, where: str, timeout: float) -> Store:
        from torch.distributed import PrefixStore

        return PrefixStore(f"{self._group}.{where}", self._store)


def meet(rendezvous: str, group: str, timeout: float) -> Meeting:
    """Raises ``ValueError`` where there is none."""
    if not rendezvous:
        raise ValueError(
            f"group {group!r}: several ranks need a rendezvous, a folder or tcp://host:port; their executor gave none"
        )
    if rendezvous.startswith("tcp://"):
        return StoreMeeting(rendezvous, group, timeout)
    return FolderMeeting(Path(rendezvous), group)


def serve(host: str, port: int = 0, timeout: float = 300.0) -> TCPStore:
    """A store at which groups can meet, for as long as it is referred to, at ``rendezvous_of`` it. Port 0: any that is free.
    Listens at ``host`` only, where torch alone would listen at all addresses of the machine."""
    from torch.distributed import TCPStore

    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),  # the store closes it
    )


def rendezvous_of(store: TCPStore) -> str:
    return f"tcp://[{store.host}]:{store.port}" if ":" in store.host else f"tcp://{store.host}:{store.port}"


def connect(address: str, timeout: float) -> TCPStore:
    """Raises ``ValueError`` for a malformed address, ``CommunicatorTimeout`` where nobody answers."""
    from torch.distributed import DistNetworkError, TCPStore

    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"rendezvous {address!r} must be a folder or tcp://host:port")
    patience = datetime.timedelta(seconds=timeout)
    try:
        return TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=patience)
    except DistNetworkError as error:
        raise CommunicatorTimeout(f"no store answers at the rendezvous {address} within {timeout:g} s") from error
