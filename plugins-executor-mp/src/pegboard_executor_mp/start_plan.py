"""What the processes of an engine are told when they start. Plain data, handed over in memory files."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pegboard_executor_mp.queue import Handle

_LENGTH: Final = 8


@dataclass(frozen=True)
class StartPlan:
    """For the supervisor and for a rank that starts in an interpreter of its own."""

    parent: int
    """Pid of the process that holds the engine."""
    sys_path: Sequence[str]
    pythonpath: str | None
    """The environment variable as the ranks are to see it."""
    preload: Sequence[str]
    spawn: bool
    hello: Sequence[int]
    """File descriptors, one per rank: where it says that it is ready, or why not."""
    boot: int
    """File descriptor of what ``Boot`` holds."""
    cores: Sequence[frozenset[int]] | None
    rendezvous: str
    segment: str
    """The queue of requests."""
    grace: float
    """Seconds that ranks get to end by themselves when the parent has ended without a word."""

    def enter(self) -> None:
        """Import from where the parent does. Until then ``environment`` has served."""
        sys.path[:] = self.sys_path
        if self.pythonpath is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = self.pythonpath


def environment(sys_path: Sequence[str]) -> Mapping[str, str]:
    """For a new interpreter that shall find what this one finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys_path)}


@dataclass(frozen=True)
class Boot:
    """For the ranks. ``composition`` is pickled: loading it imports plugins, which a rank does when its log works."""

    composition: bytes
    worlds: Sequence[Any]
    handles: Sequence[Handle]
    log_levels: dict[str, int]
    chunk_bytes: int
    num_chunks: int


@dataclass(frozen=True)
class Hello:
    """What a rank says first: where its replies come from or, as the arguments of a ``WorkerError``, why there will be none."""

    replies: Handle | None = None
    error: tuple[Any, ...] = ()

    def packed(self) -> bytes:
        """Behind its length: the end of the pipe says nothing while a process that was forked meanwhile holds it."""
        data = pickle.dumps(self, pickle.HIGHEST_PROTOCOL)
        return len(data).to_bytes(_LENGTH, "little") + data

    @classmethod
    def unpack(cls, data: bytes) -> Hello | None:
        """None while something is missing."""
        if len(data) < _LENGTH or len(data) - _LENGTH < int.from_bytes(data[:_LENGTH], "little"):
            return None
        hello = pickle.loads(data[_LENGTH:])
        assert isinstance(hello, cls)
        return hello


def memory_file(content: Any) -> int:
    """A file descriptor from which ``load`` gets ``content`` in any process that has it, any number of times."""
    fd = os.memfd_create("pegboard-mp")
    data = memoryview(pickle.dumps(content, pickle.HIGHEST_PROTOCOL))
    while data:
        data = data[os.write(fd, data) :]
    return fd


def load(fd: int) -> Any:
    """Does not move the file's position, which processes share."""
    size, data = os.fstat(fd).st_size, bytearray()
    while len(data) < size:
        data += os.pread(fd, size - len(data), len(data))
    return pickle.loads(data)
