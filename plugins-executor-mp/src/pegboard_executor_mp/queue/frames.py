"""A message as bytes: ``[table] [pickle] [buffer]...``. Pickle protocol 5 hands large buffers over beside the pickle.

Buffers of at least ``OUT_OF_BAND`` bytes are neither copied into the pickle nor out of it: one copy takes them into shared
memory, one takes them out into memory of their own, which is writable if it was before. Protocol 5 itself does so for numpy
arrays and whatever else offers a ``PickleBuffer``; here also for ``bytes`` that are the message or stand in its tuples, and
for torch tensors. The table has a word per buffer: twice its length, plus one if ``bytes`` come back.
"""

from __future__ import annotations

import copyreg
import ctypes
import io
import pickle
import struct
import sys
from typing import Any, Final

from pegboard_executor_mp.queue import tensors
from pegboard_executor_mp.queue.contract import MessageError

OUT_OF_BAND: Final = 128 << 10
"""Bytes. Below, a buffer's share of the table and of the calls costs more than two copies of it."""

_LIFT_DEPTH: Final = 3
_LIFT_WIDTH: Final = 64


class Frames:
    """``parts``: what goes into shared memory one after the other; ``pickle_bytes`` and ``num_buffers`` tell a reader where to
    cut; ``total`` is the sum."""

    __slots__ = ("num_buffers", "parts", "pickle_bytes", "total")

    def __init__(self, pickled: Any, buffers: list[memoryview]) -> None:
        self.pickle_bytes = len(pickled)
        self.num_buffers = len(buffers)
        self.total = self.pickle_bytes
        self.parts: list[Any] = [pickled]
        if buffers:
            sizes = [buffer.nbytes for buffer in buffers]
            table = [2 * size + (type(buffer.obj) is bytes) for size, buffer in zip(sizes, buffers, strict=True)]
            self.parts = [struct.pack(f"<{len(table)}Q", *table), pickled, *buffers]
            self.total += 8 * len(table) + sum(sizes)


def encode(message: Any) -> Frames:
    """Raises whatever pickling raises. The frames refer to the message's memory: they are for use before it changes."""
    buffers: list[memoryview] = []

    def take(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND:
            return True  # in the pickle
        buffers.append(raw)
        return False

    if type(message) is bytes or type(message) is tuple:
        message = _lift(message, _LIFT_DEPTH)
    if "torch" not in sys.modules:  # then no message holds a tensor
        return Frames(pickle.dumps(message, 5, buffer_callback=take), buffers)
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, 5, buffer_callback=take)
    pickler.dispatch_table = {**copyreg.dispatch_table, **tensors.reducers()}
    pickler.dump(message)
    return Frames(stream.getbuffer(), buffers)


def _lift(value: Any, depth: int) -> Any:
    """``value`` with large ``bytes`` marked to go out of band. Only through tuples: both are immutable, so that what a receiver
    gets can't be told from a copy made by pickle alone."""
    kind = type(value)
    if kind is bytes:
        return value if len(value) < OUT_OF_BAND else pickle.PickleBuffer(value)
    if kind is tuple and depth and len(value) <= _LIFT_WIDTH:
        lifted = tuple([_lift(item, depth - 1) for item in value])
        return lifted if any(a is not b for a, b in zip(value, lifted, strict=True)) else value
    return value


def parse_table(table: Any, num_buffers: int) -> list[tuple[int, type]]:
    """(bytes, type that comes back) of each buffer."""
    entries = struct.unpack_from(f"<{num_buffers}Q", table)
    return [(entry >> 1, bytes if entry & 1 else bytearray) for entry in entries]


class Payload:
    """A message in this process's own memory, not yet unpickled."""

    __slots__ = ("buffers", "pickled")

    def __init__(self, pickled: Any, buffers: list[Any]) -> None:
        self.pickled = pickled
        self.buffers = buffers

    @classmethod
    def copy(cls, body: memoryview, pickle_bytes: int, num_buffers: int) -> Payload:
        """Out of the chunk that holds all of it."""
        if not num_buffers:
            return cls(bytes(body), [])
        at = 8 * num_buffers
        pickled = bytes(body[at : at + pickle_bytes])
        at += pickle_bytes
        buffers = [kind(body[at : (at := at + size)]) for size, kind in parse_table(body, num_buffers)]
        return cls(pickled, buffers)

    def load(self) -> Any:
        """Raises ``MessageError`` from whatever unpickling raised."""
        try:
            return pickle.loads(self.pickled, buffers=self.buffers)
        except Exception as error:
            what = f"a message with a pickle of {len(self.pickled)} bytes can't be loaded"
            raise MessageError(f"{what}: {type(error).__name__}: {error}") from error


class Assembly:
    """Collects a message that takes several chunks, each part copied once, to where it stays."""

    def __init__(self, pickle_bytes: int, num_buffers: int) -> None:
        self._pickle_bytes = pickle_bytes
        self._num_buffers = num_buffers
        self._head = bytearray(8 * num_buffers + pickle_bytes)
        self._buffers: list[Any] = []
        self._targets = [memoryview(self._head)]
        self._place = (0, 0)
        """(target, bytes of it that are filled)"""
        self._next: int | None = None

    def add(self, number: int, body: memoryview) -> None:
        """Fragment ``number``. One that was added already, before an interrupt, is passed over."""
        if self._next is not None and number < self._next:
            return
        target, filled = self._place
        while len(body):
            room = self._targets[target][filled : filled + len(body)]
            size = len(room)
            room[:] = body[:size]
            body = body[size:]
            filled += size
            if filled == len(self._targets[target]) and self._is_next(target):
                target, filled = target + 1, 0
        self._place, self._next = (target, filled), number + 1

    def _is_next(self, target: int) -> bool:
        """Whether there is a target after this full one; the first holds the table that tells of the others."""
        if target == 0 and len(self._targets) == 1:
            made = [_uninitialised(size, kind) for size, kind in parse_table(self._head, self._num_buffers)]
            self._buffers = [buffer for buffer, _ in made]
            self._targets = [self._targets[0], *(view for _, view in made)]
        return target + 1 < len(self._targets)

    def finish(self) -> Payload:
        pickled = memoryview(self._head)[8 * self._num_buffers :]
        for view in self._targets:
            view.release()
        return Payload(pickled, self._buffers)


_api = ctypes.pythonapi
_api.PyMemoryView_FromMemory.restype = ctypes.py_object
_api.PyMemoryView_FromMemory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_MAKE: dict[type, Any] = {}
for _kind, _make, _address in (
    (bytes, _api.PyBytes_FromStringAndSize, _api.PyBytes_AsString),
    (bytearray, _api.PyByteArray_FromStringAndSize, _api.PyByteArray_AsString),
):
    _make.restype, _make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t)
    _address.restype, _address.argtypes = ctypes.c_void_p, (ctypes.py_object,)
    _MAKE[_kind] = (_make, _address)
_WRITE: Final = 0x200  # PyBUF_WRITE


def _uninitialised(size: int, kind: type) -> tuple[Any, memoryview]:
    """A ``bytes`` or ``bytearray`` whose memory nobody has touched yet, and a view to fill it through: what
    ``PyBytes_FromStringAndSize`` documents for a NULL string. Zeroes first would be one more pass over large messages."""
    make, address = _MAKE[kind]
    value = make(None, size)
    return value, _api.PyMemoryView_FromMemory(address(value), size, _WRITE)
