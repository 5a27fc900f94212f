"""Layout of the shared segment: a header, an array of state per reader, a ring of equal chunks.

All fields are 64-bit words. Who writes what:

* a chunk's ``sequence``: the writer. One more than the number of the fragment in it; a reader waits until it is one more than
  the number that it expects, so an old or a half-written chunk is never taken for the next one.
* ``published``: the writer. One more than the number of the last fragment; readers sleep on its low half.
* ``cursor`` of a reader: that reader. The number of the fragment that it reads next: it has let go of all chunks before. The
  writer sleeps on the low half of the slowest reader's.
* ``asleep`` of a reader: that reader. Nobody asleep, no wake-up call.
* ``wanted``, ``wanted_of``: the writer. The cursor that it sleeps for, and whose.

Numbers count up and never wrap (2**64 fragments); fragment ``n`` lies in chunk ``n % chunks``.
"""

from __future__ import annotations

import contextlib
from typing import Final

from pegboard_executor_mp.queue.contract import Closed, HandleRefused
from pegboard_executor_mp.queue.liveness import Process, pid_namespace
from pegboard_executor_mp.queue.segment import Segment

MAGIC: Final = int.from_bytes(b"pegbmsgq", "little")
LAYOUT: Final = 1
CHUNK_HEADER: Final = 64
"""Bytes before a chunk's body: the sequence, then ``reader.HEADER``."""

ABSENT, ATTACHED, CLOSED = 0, 1, 2

# Word indices. Words written by different processes lie in different cache lines (8 words).
_MAGIC, _LAYOUT, _READERS, _CHUNK_BYTES, _CHUNKS, _FIRST, _NAMESPACE = range(7)
_WRITER_PID, _WRITER_START = 8, 9
WRITER_STATE: Final = 10
JOINED: Final = 16
"""How many readers have attached; written by them, one at a time."""
PUBLISHED: Final = 24
WANTED, WANTED_OF = 32, 33
_READER_STATE: Final = 40


class Ring:
    """One process's view of the segment."""

    def __init__(self, segment: Segment) -> None:
        words = segment.words
        if words[_MAGIC] != MAGIC or words[_LAYOUT] != LAYOUT:
            found = words[_LAYOUT] if words[_MAGIC] == MAGIC else "something else"
            segment.close()
            raise HandleRefused(f"segment {segment.name} has layout {found}, this version of the queue reads {LAYOUT}")
        self.segment = segment
        self.words = words
        self.data = segment.data
        self.readers: int = words[_READERS]
        self.chunk_bytes: int = words[_CHUNK_BYTES]
        self.chunks: int = words[_CHUNKS]
        self.first: int = words[_FIRST]
        starts = [_READER_STATE + self.readers * i for i in range(5)]
        self.cursor_base, self.asleep_base, self.state_base, self._pid_base, self._start_base = starts
        self.cursors = words[self.cursor_base : self.asleep_base]
        self.asleep = words[self.asleep_base : self.state_base]
        self.states = words[self.state_base : self._pid_base]
        self._chunks_at, self._stride = _geometry(self.readers, self.chunk_bytes)

    @classmethod
    def create(cls, readers: int, chunk_bytes: int, chunks: int, first: int, setting: str) -> Ring:
        at, stride = _geometry(readers, chunk_bytes)
        segment = Segment.create(at + stride * chunks, setting)
        try:
            return cls._lay_out(segment, readers, chunk_bytes, chunks, first)
        except BaseException:
            segment.unlink()
            raise

    @classmethod
    def _lay_out(cls, segment: Segment, readers: int, chunk_bytes: int, chunks: int, first: int) -> Ring:
        words = segment.words
        me = Process.current()
        words[_LAYOUT], words[_READERS], words[_CHUNK_BYTES], words[_CHUNKS] = LAYOUT, readers, chunk_bytes, chunks
        words[_FIRST], words[_NAMESPACE] = first, pid_namespace()
        words[_WRITER_PID], words[_WRITER_START], words[WRITER_STATE] = me.pid, me.start, ATTACHED
        words[PUBLISHED] = first
        words[_MAGIC] = MAGIC
        ring = cls(segment)
        for reader in range(readers):
            ring.cursors[reader] = first
        return ring

    @property
    def writer(self) -> Process:
        return Process(self.words[_WRITER_PID], self.words[_WRITER_START])

    def reader(self, index: int) -> Process:
        return Process(self.words[self._pid_base + index], self.words[self._start_base + index])

    def chunk(self, number: int) -> int:
        """Where the chunk of fragment ``number`` starts, in bytes: first its sequence, ``CHUNK_HEADER`` later its body."""
        return self._chunks_at + number % self.chunks * self._stride

    def claim(self, index: int) -> None:
        """Make this process reader ``index``. The caller holds the segment's lock."""
        if self.words[_NAMESPACE] != pid_namespace():
            raise HandleRefused("the queue's writer is in another pid namespace: neither end could tell whether the other lives")
        if self.words[WRITER_STATE] != ATTACHED or not self.writer.alive():
            self.segment.unlink()
            raise Closed("the queue's writer is gone")
        if self.states[index] != ABSENT:
            raise HandleRefused(f"reader {index} is attached already, in process {self.reader(index).pid}")
        me = Process.current()
        self.words[self._pid_base + index], self.words[self._start_base + index] = me.pid, me.start
        self.states[index] = ATTACHED
        self.words[JOINED] += 1

    def word_address(self, index: int) -> int:
        return self.segment.address + index * 8

    def close(self) -> None:
        """Unmap. Idempotent. A view that a traceback still holds keeps the mapping until it is forgotten."""
        for view in (self.cursors, self.asleep, self.states):
            view.release()
        with contextlib.suppress(BufferError):
            self.segment.close()


def _geometry(readers: int, chunk_bytes: int) -> tuple[int, int]:
    """(where the first chunk starts, bytes from one chunk to the next), multiples of a cache line."""
    header = (_READER_STATE + 5 * readers) * 8
    return -(-header // 64) * 64, CHUNK_HEADER + -(-chunk_bytes // 64) * 64
