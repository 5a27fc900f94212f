"""The queue keeps the transport contract, for readers on this machine, over TCP, and both at once."""

from __future__ import annotations

from typing import Any

from pegboard.contracts.transport import Reader, Writer
from pegboard.testing.conformance.transport import TransportConformance
from pegboard_executor_mp.queue import MessageQueue, attach


class TestLocalReaders(TransportConformance):
    attach = staticmethod(attach)

    def make(self, num_readers: int) -> Writer:
        return MessageQueue.create(num_readers, chunk_bytes=4096, num_chunks=8)


class TestDefaultSize(TransportConformance):
    attach = staticmethod(attach)

    def make(self, num_readers: int) -> Writer:
        return MessageQueue.create(num_readers)


class TestRemoteReaders(TransportConformance):
    attach = staticmethod(attach)

    def make(self, num_readers: int) -> Writer:
        return MessageQueue.create(0, remote_readers=num_readers, host="127.0.0.1", chunk_bytes=4096, num_chunks=8)


class TestBothKinds(TransportConformance):
    """The last of several readers is remote."""

    attach = staticmethod(attach)

    def make(self, num_readers: int) -> Writer:
        local = num_readers - 1
        return MessageQueue.create(local, remote_readers=1, host="127.0.0.1", chunk_bytes=4096, num_chunks=8)


def test_base_classes(request: Any) -> None:
    writer = MessageQueue.create(1)
    request.addfinalizer(writer.close)
    reader = attach(writer.handle())
    assert isinstance(writer, Writer)
    assert isinstance(reader, Reader)
