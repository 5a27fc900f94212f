"""A group's shared memory: 64-bit words by which ranks tell one another how far they are, and slots for data.

The memory is a sealed memfd: it has no name, so nothing is left over however its ranks end, it isn't limited by the size of
/dev/shm (64 MB in many containers), and it cannot shrink under a reader. Pages that are never used take no memory.

Each word has one writer, except that anybody may clear ``asleep``. Words of different writers are on different cache lines.
Python reads and writes an aligned word of a memoryview with one load or store; for order among them see ``fences``.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import torch

from pegboard.contracts.communicator import CommunicatorError
from pegboard_plugins.communicators.fences import make_fence
from pegboard_plugins.communicators.peers import Process

VERSION = 1
"""Of the layout; a rank refuses another one."""

_LINE = 16
"""Words per cache line: 128 bytes, the larger of what processors fetch at a time."""
_PAGE = 4096
_NO_EXECUTE = 8
"""MFD_NOEXEC_SEAL, since Linux 6.3."""


class Segment:
    """Indices of words are attributes and methods; slot k of two is used in turn."""

    OPEN = 0
    """1 once all ranks have come."""

    def __init__(self, file: int, world_size: int, slot_bytes: int) -> None:
        self.world_size, self.slot_bytes = world_size, slot_bytes
        self._lines_per_rank = 3 + 2 * world_size
        header = 8 * _LINE * (1 + world_size * self._lines_per_rank)
        self._data = -(-header // _PAGE) * _PAGE
        slots = 2 * world_size * (1 + world_size)
        self.size = self._data + slots * slot_bytes
        if os.fstat(file).st_size == 0:
            os.ftruncate(file, self.size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        memory = mmap.mmap(file, self.size)  # unmapped when the last view of it is gone
        self.words = memoryview(memory)[:header].cast("Q")
        with torch.inference_mode(False):  # so that it can be written to in any mode
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    # -- words of a rank ---------------------------------------------------------------------------------------------

    def posted(self, rank: int) -> int:
        """Collectives for which this rank's data is there; the two words after it hold the signatures of the last two."""
        return self._word(rank, 0)

    def asleep(self, rank: int) -> int:
        """1 while this rank sleeps, or is about to; whoever clears it wakes the rank."""
        return self._word(rank, 1)

    def attached(self, rank: int) -> int:
        """1 once the rank has come; the two words after it hold its process id and when that started."""
        return self._word(rank, 2)

    def left(self, rank: int) -> int:
        """1 after the rank has closed its end or failed."""
        return self._word(rank, 2) + 3

    def sent(self, rank: int, to: int) -> int:
        """Messages sent to another rank; the two words after it hold the signatures of the last two."""
        return self._word(rank, 3 + to)

    def taken(self, rank: int, source: int) -> int:
        """Messages taken from another rank."""
        return self._word(rank, 3 + self.world_size + source)

    def _word(self, rank: int, line: int) -> int:
        return _LINE * (1 + rank * self._lines_per_rank + line)

    def address(self, word: int) -> int:
        return self._bytes.data_ptr() + 8 * word

    # -- data --------------------------------------------------------------------------------------------------------

    def slot(self, rank: int, turn: int) -> torch.Tensor:
        """What a rank contributes to a collective: uint8 [slot_bytes]."""
        return self._slot(2 * rank + turn)

    def mailbox(self, source: int, to: int, turn: int) -> torch.Tensor:
        """What one rank sends to another: uint8 [slot_bytes]."""
        return self._slot(2 * (self.world_size * (1 + source) + to) + turn)

    def _slot(self, number: int) -> torch.Tensor:
        return self._bytes.narrow(0, self._data + number * self.slot_bytes, self.slot_bytes)

    # -- who is there ------------------------------------------------------------------------------------------------

    def enter(self, rank: int, process: Process) -> None:
        word = self.attached(rank)
        if self.words[word]:
            raise CommunicatorError(f"rank {rank} has come twice: processes {self.process(rank).pid} and {process.pid}")
        self.words[word + 1], self.words[word + 2] = process.pid, process.started
        make_fence()()
        self.words[word] = 1

    def process(self, rank: int) -> Process:
        """Of a rank that has come."""
        word = self.attached(rank)
        return Process(Process.current().host, self.words[word + 1], self.words[word + 2])


def new_file() -> int:
    """A file descriptor of memory without a name."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("pegboard-communicator", flags | _NO_EXECUTE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("pegboard-communicator", flags)


def open_file(process: Process, descriptor: int) -> int:
    """The memory behind another process's descriptor."""
    path = f"/proc/{process.pid}/fd/{descriptor}"
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CommunicatorError(
            f"cannot open the shared memory of process {process.pid} ({path}: {error.strerror}); the ranks of a group must run "
            f"as the same user, or choose the communicator 'torch_distributed'"
        ) from error
