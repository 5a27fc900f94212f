"""The reader of a queue on the writer's machine."""

from __future__ import annotations

import os
import struct
import threading
import time
import weakref
from typing import Any, Final, NoReturn

from pegboard_executor_mp.queue.contract import Closed, DeadWriter, HandleRefused, Reader
from pegboard_executor_mp.queue.frames import Assembly, Payload
from pegboard_executor_mp.queue.futex import Word, make_fence, make_order, sleep_precisely
from pegboard_executor_mp.queue.liveness import Watch
from pegboard_executor_mp.queue.rhythm import Rhythm
from pegboard_executor_mp.queue.ring import CHUNK_HEADER, CLOSED, JOINED, PUBLISHED, WANTED, WANTED_OF, WRITER_STATE, Ring
from pegboard_executor_mp.queue.segment import Segment

HEADER: Final = struct.Struct("<IIQQd")
"""After a chunk's sequence: flags, number of buffers, bytes in this chunk, bytes of the pickle, when it was published."""

FIRST, LAST = 1, 2
WHOLE: Final = FIRST | LAST

RECHECK: Final = 0.25
"""Seconds. Nobody sleeps longer without looking: at the ring, in case a wake-up got lost, and whether the other end lives."""

CANCEL_TRIES: Final = 100
"""Wake-ups half a millisecond apart. Whoever misses all of them notices at its next recheck."""

_LOW: Final = 0xFFFFFFFF
_BETWEEN_FRAGMENTS: Final = 300e-6
"""Seconds to spin for the next fragment of a message: the writer is copying it at this moment."""


class LocalReader(Reader):
    """``get`` is for one thread at a time; ``cancel`` and ``close`` may come from others. A process that was forked off may not
    use its parent's reader.

    Nothing is lost or read twice when a signal's handler raises inside ``get``: what was received stays in ``_state`` until
    statements that no handler can come between (they call nothing) let go of it and return it.
    """

    def __init__(self, ring: Ring, index: int) -> None:
        self.index = index
        self._ring = ring
        self._pid = os.getpid()
        self._inside = 0  # the thread that is in ``get``
        self._fence = make_fence()
        self._order = make_order(self._fence)
        self._state: tuple[int, Payload | None] = (ring.cursors[index], None)
        """(number of the next fragment, what was received but not yet unpickled)"""
        self._cursor = ring.cursor_base + index
        self._asleep = ring.asleep_base + index
        self._published = Word(ring.word_address(PUBLISHED))
        self._my_cursor = Word(ring.word_address(self._cursor))
        self._rhythm = Rhythm()
        self._precise = 0  # the thread whose sleeps are precise
        self._heard = 0.0  # when the last message's first fragment was published
        self._watch = Watch()
        self._watch.add(0, ring.writer)
        self._assembly: Assembly | None = None
        self._waiting = False
        self._unusable = ""
        self._finalizer = weakref.finalize(self, _leave, ring, index, self._my_cursor, self._watch, self._pid)

    @classmethod
    def attach(cls, segment: str, index: int) -> LocalReader:
        with Segment.open_locked(segment) as opened:
            ring = Ring(opened)
            try:
                if not 0 <= index < ring.readers:
                    raise HandleRefused(f"the queue has readers 0 to {ring.readers - 1}, there is no reader {index}")
                ring.claim(index)
            except BaseException:
                ring.close()
                raise
            try:
                Word(ring.word_address(JOINED)).wake()
                return cls(ring, index)
            except BaseException:
                ring.states[index] = CLOSED  # the writer counts on this reader by now
                ring.close()
                raise

    def get(self, timeout: float | None = None) -> Any:
        """The next message. Raises ``TimeoutError`` (nothing is lost: the next call goes on), ``Closed`` once the writer is
        gone and all that it sent has been read, or this end was closed or cancelled; ``MessageError`` for a message that
        cannot be unpickled, which counts as read."""
        if self._inside:
            raise RuntimeError(f"reader {self.index} is in use by another thread")
        self._inside = threading.get_ident()
        try:
            if self._unusable or os.getpid() != self._pid:
                self._refuse()
            payload = self._receive(None if timeout is None else time.monotonic() + timeout)
            try:
                message = payload.load()
            except Exception:
                self._state = (self._state[0], None)
                raise
            self._state = (self._state[0], None)
            return message
        finally:
            self._inside = 0

    def cancel(self) -> None:
        """From any thread: a waiting ``get`` and all later ones raise ``Closed``."""
        self._unusable = self._unusable or "cancelled"
        for _ in range(CANCEL_TRIES):
            if not self._waiting or self._unusable == "closed":
                return
            self._published.wake()  # it may be about to sleep: once more, until it has noticed
            time.sleep(0.0005)

    def close(self) -> None:
        """Idempotent; a ``get`` that waits in another thread raises ``Closed``."""
        if os.getpid() != self._pid:
            return
        self.cancel()
        while self._inside:
            if self._inside == threading.get_ident():
                return  # a signal's handler inside ``get``, which raises when it goes on; the end comes when this is forgotten
            time.sleep(0.001)
        self._unusable = "closed"
        self._finalizer()

    # -- receiving -----------------------------------------------------------------------------------------------------

    def _refuse(self) -> NoReturn:
        if self._unusable:
            raise Closed(f"reader {self.index} was {self._unusable}")
        raise Closed(f"reader {self.index} belongs to process {self._pid}; attach to another handle in this one")

    def _receive(self, deadline: float | None) -> Payload:
        """The next payload, left in ``_state`` too until it has been unpickled."""
        ring = self._ring
        data = ring.data
        number, payload = self._state
        if ring.words[self._cursor] != number:
            self._release(number)  # which an interrupt prevented
        while payload is None:
            at = ring.chunk(number)
            if ring.words[at >> 3] != number + 1:
                self._await(at, number + 1, deadline)
            self._order()  # the look at the sequence before the reads of the chunk
            flags, num_buffers, size, pickle_bytes, published = HEADER.unpack_from(data, at + 8)
            body = data[at + CHUNK_HEADER : at + CHUNK_HEADER + size]
            if flags == WHOLE:
                payload = Payload.copy(body, pickle_bytes, num_buffers)
            else:
                if flags & FIRST:
                    self._assembly = Assembly(pickle_bytes, num_buffers)
                assert self._assembly is not None
                self._assembly.add(number, body)
                payload = self._assembly.finish() if flags & LAST else None
            body.release()
            if flags & FIRST:
                self._heard = published
            number += 1
            self._state = (number, payload)  # at once: an interrupt comes before or after
            self._release(number)
            if flags & LAST:
                self._assembly = None
        return payload

    def _release(self, number: int) -> None:
        """Let go of the chunks before fragment ``number``: all of them that matters has been copied."""
        words = self._ring.words
        self._order()  # the reads of the chunk before its release
        words[self._cursor] = number
        self._fence()  # the release before the look at who waits for it
        if words[WANTED_OF] == self.index and 0 < words[WANTED] <= number:
            self._my_cursor.wake()

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _await(self, at: int, expected: int, deadline: float | None) -> None:
        """Until the sequence of the chunk at byte ``at`` is ``expected``."""
        self._waiting = True
        try:
            if not self._spin_when_due(at >> 3, expected, deadline):
                self._sleep(at >> 3, expected, deadline)
        finally:
            self._waiting = False

    def _spin_when_due(self, sequence: int, expected: int, deadline: float | None) -> bool:
        now = time.monotonic()
        rhythm = self._rhythm
        if self._heard != rhythm.last:
            rhythm.heard(self._heard)
        if self._assembly is not None:
            return rhythm.may_spin and self._spin(sequence, expected, now + _BETWEEN_FRAGMENTS)
        plan = rhythm.plan(now)
        if plan is None:
            return False
        start, end = plan
        if deadline is not None and start >= deadline:
            return False
        if self._precise != self._inside:
            sleep_precisely()
            self._precise = self._inside
        if start - rhythm.late > now:
            if self._sleep_until(sequence, expected, start - rhythm.late):
                return True
            now = time.monotonic()
            rhythm.got_up(start - rhythm.late, now)
        arrived = self._spin(sequence, expected, end if deadline is None else min(end, deadline))
        rhythm.spun(time.monotonic() - now)
        return arrived

    def _spin(self, sequence: int, expected: int, end: float) -> bool:
        words, clock, give_way = self._ring.words, time.monotonic, os.sched_yield
        while words[sequence] != expected:
            give_way()  # the writer may need this core
            if clock() > end or self._unusable:
                return words[sequence] == expected
        return True

    def _sleep(self, sequence: int, expected: int, deadline: float | None) -> None:
        while True:
            now = time.monotonic()
            recheck = now + RECHECK if deadline is None else min(now + RECHECK, deadline)
            if self._sleep_until(sequence, expected, recheck):
                return
            if self._unusable:
                self._refuse()
            self._check_writer(sequence, expected)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError("no message came in time")

    def _sleep_until(self, sequence: int, expected: int, until: float) -> bool:
        """Whether the fragment is there. May return early."""
        words = self._ring.words
        words[self._asleep] = 1
        try:
            self._fence()  # the writer either sees this reader asleep, or this reader sees its fragment
            seen = words[PUBLISHED] & _LOW
            self._fence()
            if words[sequence] != expected and words[WRITER_STATE] != CLOSED and not self._unusable:
                self._published.wait(seen, until)
        finally:
            words[self._asleep] = 0
        return words[sequence] == expected

    def _check_writer(self, sequence: int, expected: int) -> None:
        words = self._ring.words
        closed = words[WRITER_STATE] == CLOSED
        if not closed and not self._watch.dead():
            return
        self._fence()
        if words[sequence] == expected:  # its last words
            return
        self._ring.segment.unlink()
        raise DeadWriter("the writer closed the queue" if closed else f"the writer's process {self._ring.writer.pid} has ended")


def _leave(ring: Ring, index: int, cursor: Word, watch: Watch, pid: int) -> None:
    """Also runs when a reader is forgotten, or the interpreter ends; in a forked child it leaves the parent's reader alone."""
    if os.getpid() == pid:
        ring.states[index] = CLOSED
        cursor.wake()
        watch.close()
        ring.close()
