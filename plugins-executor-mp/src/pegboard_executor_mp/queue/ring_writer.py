"""The writing end of a ring: fills chunks, wakes readers, waits for room, notices readers that are gone."""

from __future__ import annotations

import os
import time
from typing import Any, Final

from pegboard_executor_mp.queue.contract import Closed, DeadReader
from pegboard_executor_mp.queue.frames import Frames
from pegboard_executor_mp.queue.futex import Word, make_fence, make_order
from pegboard_executor_mp.queue.liveness import Watch
from pegboard_executor_mp.queue.reader import CANCEL_TRIES, FIRST, HEADER, LAST, RECHECK, WHOLE
from pegboard_executor_mp.queue.rhythm import cores
from pegboard_executor_mp.queue.ring import (
    ABSENT,
    ATTACHED,
    CHUNK_HEADER,
    CLOSED,
    JOINED,
    PUBLISHED,
    WANTED,
    WANTED_OF,
    WRITER_STATE,
    Ring,
)

_LOW: Final = 0xFFFFFFFF
_SPIN_FOR_ROOM: Final = 30e-6
"""Seconds. A reader copies a chunk in about that time."""


class RingWriter:
    """One thread at a time: ``QueueWriter`` sees to that, except for ``cancel``."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._fence = make_fence()
        self._order = make_order(self._fence)
        self._published = Word(ring.word_address(PUBLISHED))
        self._joined = Word(ring.word_address(JOINED))
        self._cursors = [Word(ring.word_address(ring.cursor_base + i)) for i in range(ring.readers)]
        self._next = ring.first
        self._free_until = ring.first + ring.chunks
        self._watch = Watch()
        self._watched: set[int] = set()
        self._look_again = 0.0
        self._ready = False
        self._waiting: Word | None = None
        self._may_spin = cores() > 1
        self.cancelled = False

    def wait_ready(self, deadline: float | None) -> None:
        """Until all readers have attached; from then on the segment has no name, so nothing is left however we end."""
        while not self._look_for_readers():
            self._sleep(self._joined, JOINED, deadline, "not all readers have attached")
            self._raise_if_reader_gone()

    def put(self, frames: Frames, deadline: float | None) -> None:
        """All readers get the frames, or, if it raises, none does."""
        ring, number = self._ring, self._next
        at = ring.chunk(number)
        if ring.words[at >> 3] == number + 1:
            self._announce(number)  # which an interrupt prevented
            number += 1
            at = ring.chunk(number)
        if (now := time.monotonic()) >= self._look_again:
            self._look_for_readers()
            self._raise_if_reader_gone()
            self._look_again = now + RECHECK if self._ready else 0.0
        if frames.total > ring.chunk_bytes:
            self._put_in_fragments(frames, deadline)
            return
        if number >= self._free_until:
            self._make_room(1, deadline)
        self._publish(number, at, WHOLE, frames.parts, frames, frames.total)

    def cancel(self) -> None:
        self.cancelled = True
        for _ in range(CANCEL_TRIES):
            if (word := self._waiting) is None:
                return
            word.wake()  # it may be about to sleep: once more, until it has noticed
            time.sleep(0.0005)

    def close(self) -> None:
        ring = self._ring
        ring.words[WRITER_STATE] = CLOSED
        self._fence()
        ring.words[PUBLISHED] = self._next + 1  # a reader that is about to sleep on the old value will not
        self._published.wake()
        ring.segment.unlink()
        self._watch.close()
        ring.close()

    # -- filling chunks ------------------------------------------------------------------------------------------------

    def _put_in_fragments(self, frames: Frames, deadline: float | None) -> None:
        """No message is too large for the ring: readers copy a fragment out while the next is written. Given up half-way, what
        was sent is dropped by the readers when the next message starts."""
        ring, left, flags = self._ring, frames.total, FIRST
        cut = _Cutter(frames.parts)
        while left:
            number = self._next
            if number >= self._free_until:  # sleep till half the ring is free, so as not to wake for each chunk
                self._make_room(min(-(-left // ring.chunk_bytes), max(1, ring.chunks // 2)), deadline)
            size = min(left, ring.chunk_bytes)
            left -= size
            self._publish(number, ring.chunk(number), flags | (0 if left else LAST), cut.take(size), frames, size)
            flags = 0

    def _publish(self, number: int, at: int, flags: int, parts: list[Any], frames: Frames, size: int) -> None:
        """Fill the chunk at byte ``at`` with ``parts``, ``size`` bytes, as fragment ``number``."""
        data, end = self._ring.data, at + CHUNK_HEADER
        for part in parts:
            start, end = end, end + len(part)
            data[start:end] = part
        HEADER.pack_into(data, at + 8, flags, frames.num_buffers, size, frames.pickle_bytes, time.monotonic())
        self._order()  # the contents before the sequence that declares them
        self._ring.words[at >> 3] = number + 1
        self._announce(number)

    def _announce(self, number: int) -> None:
        """Tell readers of fragment ``number``, whose sequence has been stored."""
        ring = self._ring
        self._next = number + 1
        self._order()  # the sequence before the word that sleepers sleep on
        ring.words[PUBLISHED] = number + 1
        self._fence()  # all of it before the look at who sleeps
        if max(ring.asleep):
            self._published.wake()

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _make_room(self, chunks: int, deadline: float | None) -> None:
        """Until ``chunks`` chunks from ``_next`` on are free."""
        ring = self._ring
        wanted = self._next + chunks - ring.chunks
        spin_until = time.monotonic() + _SPIN_FOR_ROOM if self._may_spin else 0.0
        while (slowest := min(cursors := list(ring.cursors))) < wanted:
            if time.monotonic() < spin_until:
                os.sched_yield()
                continue
            reader = cursors.index(slowest)
            ring.words[WANTED_OF], ring.words[WANTED] = reader, wanted
            try:
                self._fence()  # the reader either sees that it is waited for, or we see its cursor
                self._sleep(self._cursors[reader], ring.cursor_base + reader, deadline, f"reader {reader} leaves no room", wanted)
            finally:
                ring.words[WANTED] = 0
            self._look_for_readers()
            self._raise_if_reader_gone()
        self._free_until = slowest + ring.chunks
        self._order()  # the look at the cursors before the writes into what they freed

    def _sleep(self, word: Word, index: int, deadline: float | None, what: str, enough: int | None = None) -> None:
        """On word ``index`` of the ring, unless it has reached ``enough``."""
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            raise TimeoutError(what)
        value = self._ring.words[index]
        self._waiting = word
        try:
            if not self.cancelled and (enough is None or value < enough):
                word.wait(value & _LOW, min(now + RECHECK, now + RECHECK if deadline is None else deadline))
        finally:
            self._waiting = None
        if self.cancelled:
            raise Closed("the writer was cancelled")

    # -- readers -------------------------------------------------------------------------------------------------------

    def _look_for_readers(self) -> bool:
        """Whether all have attached."""
        if not self._ready:
            states = self._ring.states
            for reader, state in enumerate(states):
                if state == ATTACHED and reader not in self._watched:
                    self._watched.add(reader)
                    self._watch.add(reader, self._ring.reader(reader))
            self._ready = ABSENT not in states
            if self._ready:
                self._ring.segment.unlink()
        return self._ready

    def _raise_if_reader_gone(self) -> None:
        for reader, state in enumerate(self._ring.states):
            if state == CLOSED:
                raise DeadReader(reader, "closed its end")
        for reader in self._watch.dead():
            raise DeadReader(reader, f"has ended (process {self._ring.reader(reader).pid})")


class _Cutter:
    """Cuts a sequence of buffers into pieces of given sizes."""

    def __init__(self, parts: list[memoryview]) -> None:
        self._parts = [memoryview(part) for part in reversed(parts)]

    def take(self, size: int) -> list[memoryview]:
        pieces = []
        while size:
            part = self._parts.pop()
            if len(part) > size:
                self._parts.append(part[size:])
                part = part[:size]
            pieces.append(part)
            size -= len(part)
        return pieces
