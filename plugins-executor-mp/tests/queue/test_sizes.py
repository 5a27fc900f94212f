"""Messages of sizes around a chunk and far beyond, there and back, small ones between them."""

from __future__ import annotations

import hashlib
import os
import random
from typing import Any

import pytest

from pegboard.testing.processes import PATIENCE, children
from pegboard_executor_mp.queue import MessageQueue, attach
from pegboard_executor_mp.queue.frames import encode


def with_total(total: int, seed: int) -> bytes:
    """Bytes whose message takes exactly ``total`` bytes of chunks."""
    size = total
    while encode(bytes(size)).total > total:
        size -= 1
    assert encode(bytes(size)).total == total
    return random.Random(seed).randbytes(size)


def resident(pid: int) -> int:
    """Bytes."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("chunk", "chunks"), [(1000, 1), (4096, 3), (40_000, 4)])
def test_sizes_both_ways(chunk: int, chunks: int) -> None:
    def echo(connection: Any) -> None:
        reader, writer = attach(connection.recv()), MessageQueue.create(1, chunk_bytes=chunk, num_chunks=chunks)
        connection.send(writer.handle())
        while (blob := reader.get(PATIENCE)) is not None:
            writer.put((blob, hashlib.sha256(blob).digest()), PATIENCE)
        writer.close()

    totals = [chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1, 10 * chunk]
    blobs = [b"", b"x", *(with_total(total, seed) for seed, total in enumerate(totals))]
    forth = MessageQueue.create(1, chunk_bytes=chunk, num_chunks=chunks)
    with children(echo) as (child,):
        child.send(forth.handle())
        back = attach(child.received())
        forth.wait_ready(PATIENCE)
        before: list[int] = []
        for round_ in range(50):
            for blob in blobs:
                for message in (b"small", blob):
                    forth.put(message, PATIENCE)
                    received, digest = back.get(PATIENCE)
                    assert received == message
                    assert digest == hashlib.sha256(message).digest()
            if round_ == 10:
                before = [resident(os.getpid()), resident(child.pid)]
        after = [resident(os.getpid()), resident(child.pid)]
        assert all(now < then + (8 << 20) for now, then in zip(after, before, strict=True))
        forth.put(None, PATIENCE)
        back.close()
        forth.close()


def test_one_large_message_is_not_held_up_by_readers_at_different_speeds() -> None:
    """Larger than the ring many times over, three readers."""

    def read(connection: Any) -> None:
        reader = attach(connection.recv())
        connection.send(hashlib.sha256(reader.get(PATIENCE)).digest())

    blob = random.Random(1).randbytes(40 << 20)
    queue = MessageQueue.create(3, chunk_bytes=64 << 10, num_chunks=4)
    with children(read, read, read) as readers:
        for index, child in enumerate(readers):
            child.send(queue.handle(index))
        queue.wait_ready(PATIENCE)
        queue.put(blob, PATIENCE)
        assert [child.received() for child in readers] == [hashlib.sha256(blob).digest()] * 3
        queue.close()
