"""MessageQueue: makes the two ends of a queue."""

from __future__ import annotations

import contextlib
from typing import Final

from pegboard_executor_mp.queue.contract import Reader
from pegboard_executor_mp.queue.handle import Handle
from pegboard_executor_mp.queue.reader import LocalReader
from pegboard_executor_mp.queue.remote_writer import RemoteWriter
from pegboard_executor_mp.queue.ring import Ring
from pegboard_executor_mp.queue.ring_writer import RingWriter
from pegboard_executor_mp.queue.writer import QueueWriter

CHUNK_BYTES: Final = 260 << 10
"""A message of a power of two bytes, its pickle included, fills whole chunks. Pieces of half a megabyte or more leave a core's
cache on their way, smaller ones cost more calls."""

NUM_CHUNKS: Final = 16


class MessageQueue:
    """A queue has one writer and a fixed number of readers, which may attach late: nothing that was put is lost to them."""

    @staticmethod
    def create(
        num_readers: int,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        num_chunks: int = NUM_CHUNKS,
        remote_readers: int = 0,
        host: str | None = None,
        peer_timeout: float = 5.0,
        setting: str = "num_chunks or chunk_bytes",
        first_fragment: int = 0,
    ) -> QueueWriter:
        """``num_readers`` on this machine, ``remote_readers`` on others, which connect to this machine's address ``host``.

        The queue takes about ``num_chunks * chunk_bytes`` of ``/dev/shm``, at once; larger messages pass through in pieces.
        ``setting`` is what to lower when that is not free, for the message of ``NoSharedMemory``. ``first_fragment`` numbers
        the first chunk that is written. A remote peer that shows no life for ``peer_timeout`` seconds is dead.
        """
        for name, value, least in (
            ("num_readers", num_readers, 0 if remote_readers else 1),
            ("chunk_bytes", chunk_bytes, 64),
            ("num_chunks", num_chunks, 1),
            ("remote_readers", remote_readers, 0),
            ("first_fragment", first_fragment, 0),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}, it must be at least {least}")
        if remote_readers and not host:
            raise ValueError("remote_readers needs host: an address of this machine that the readers can reach")
        with contextlib.ExitStack() as undo:
            ring = remote = None
            segment = None
            if num_readers:
                shared = Ring.create(num_readers, chunk_bytes, num_chunks, first_fragment, setting)
                undo.callback(shared.segment.unlink)
                ring, segment = RingWriter(shared), shared.segment.name
            if host and remote_readers:
                remote = RemoteWriter(host, num_readers, remote_readers, num_chunks, num_chunks * chunk_bytes, peer_timeout)
            undo.pop_all()
        return QueueWriter(ring, segment, num_readers, remote)


def attach(handle: Handle) -> Reader:
    """The reader of ``handle``, in the calling process. Raises ``HandleRefused``, ``Closed`` when the queue is gone."""
    handle.check()
    if handle.segment is not None:
        return LocalReader.attach(handle.segment, handle.reader)
    from pegboard_executor_mp.queue.remote_reader import RemoteReader

    return RemoteReader.attach(handle)
