"""Readers on other hosts: strangers at the port, peers that vanish, two hosts for real."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from pegboard.testing.processes import PATIENCE, children
from pegboard_executor_mp.queue import Closed, DeadReader, DeadWriter, Handle, HandleRefused, MessageQueue, attach, segment
from pegboard_executor_mp.queue.remote_link import GREETING, HELLO
from pegboard_executor_mp.queue.writer import QueueWriter


@pytest.fixture
def queue() -> Iterator[QueueWriter]:
    queue = MessageQueue.create(0, remote_readers=1, host="127.0.0.1", chunk_bytes=1024, num_chunks=4)
    yield queue
    queue.close()


def test_hosts() -> None:
    with pytest.raises(OSError, match=r"can't listen on host '192\.0\.2\.1'"):
        MessageQueue.create(1, remote_readers=1, host="192.0.2.1")
    assert not list(Path(segment.DIRECTORY).glob(f"{segment.PREFIX}{os.getpid()}-*"))
    with pytest.raises(ValueError, match="give an address that the readers can connect to"):
        MessageQueue.create(0, remote_readers=1, host="0.0.0.0")
    with pytest.raises(ValueError, match="remote_readers needs host"):
        MessageQueue.create(0, remote_readers=1)


@pytest.mark.parametrize("host", ["localhost", "::1"])
def test_names_and_families(host: str) -> None:
    try:
        queue = MessageQueue.create(0, remote_readers=1, host=host)
    except OSError:
        pytest.skip(f"this machine does not have {host}")
    reader = attach(queue.handle())
    queue.put("hello", PATIENCE)
    queue.wait_ready(PATIENCE)
    assert reader.get(PATIENCE) == "hello"
    queue.close()
    reader.close()


def test_nobody_listens() -> None:
    queue = MessageQueue.create(0, remote_readers=1, host="127.0.0.1")
    handle = queue.handle()
    queue.close()
    with pytest.raises(Closed, match="no writer can be reached at tcp://127"):
        attach(handle)


def test_strangers_do_no_harm(queue: QueueWriter) -> None:
    address = queue.handle().address
    assert address is not None
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    for noise in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(1000), b""):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(noise)
    context = zmq.Context()
    other = context.socket(zmq.DEALER)
    other.connect(address)
    token = queue.handle().token
    for parts in (
        [b"hello"],
        [b"ack", b"\xff" * 8],
        [b"bye"],
        [b""],
        [HELLO, b"short", token],
        [HELLO, GREETING.pack(1, 0), b"wrong token"],
        [HELLO, GREETING.pack(1, 7), token],
        [HELLO, GREETING.pack(99, 0), token],
        [b"x" * 3000, b"y" * 3000],
    ):
        other.send_multipart(parts)
    reader = attach(queue.handle())
    queue.wait_ready(PATIENCE)
    queue.put("hello", PATIENCE)
    assert reader.get(PATIENCE) == "hello"
    reasons: list[str] = []
    while len(reasons) < 5:
        queue.wait_ready(PATIENCE)  # a writer answers while it is called
        if other.poll(10):
            reasons.append(other.recv_multipart()[-1].decode())
    assert reasons[:2] == ["the reader has protocol -1, the writer 1"] * 2
    assert reasons[2:] == ["the handle is not of this queue"] * 2 + ["the reader has protocol 99, the writer 1"]
    other.send_multipart([b"ack", b"z" * (1 << 20)])  # more than a reader ever says: cut off
    other.close(0)
    context.term()
    for number in range(50):
        queue.put(number, PATIENCE)
        assert reader.get(PATIENCE) == number
    reader.close()


def test_a_handle_of_another_queue(queue: QueueWriter) -> None:
    handle = queue.handle()
    reader = attach(Handle(0, address=handle.address, token=b"0" * 16))
    with pytest.raises(TimeoutError):
        queue.wait_ready(0.3)
    with pytest.raises(HandleRefused, match="not of this queue"):
        reader.get(PATIENCE)
    reader.close()


def test_what_is_under_way_is_bounded(queue: QueueWriter) -> None:
    reader = attach(queue.handle())
    queue.wait_ready(PATIENCE)
    for number in range(4):  # the window: four messages
        queue.put(number, PATIENCE)
    with pytest.raises(TimeoutError, match=r"remote readers \[0\] leave no room"):
        queue.put(4, 0.1)
    assert [reader.get(PATIENCE) for _ in range(4)] == [0, 1, 2, 3]
    queue_large = threading.Thread(target=lambda: queue.put(bytes(10_000), PATIENCE))  # more than the window's 4096 bytes: alone
    queue_large.start()
    assert reader.get(PATIENCE) == bytes(10_000)
    queue_large.join(PATIENCE)
    reader.close()


def test_a_frozen_reader_is_dead() -> None:
    """As on a host that stops without a word: no heartbeat comes any more, the connection stays open."""

    def read(connection: Any) -> None:
        reader = attach(connection.recv())
        while True:
            reader.get(PATIENCE)

    queue = MessageQueue.create(0, remote_readers=1, host="127.0.0.1", peer_timeout=0.5)
    with children(read) as (child,):
        child.send(queue.handle())
        queue.wait_ready(PATIENCE)
        os.kill(child.pid, signal.SIGSTOP)
        with contextlib.suppress(DeadReader):
            for _ in range(2000):
                queue.put(bytes(100), PATIENCE)
        with pytest.raises(DeadReader, match="can't be reached any more"):
            queue.put(bytes(100), PATIENCE)
    queue.close()


def test_a_frozen_writer_is_dead() -> None:
    def write(connection: Any) -> None:
        queue = MessageQueue.create(0, remote_readers=1, host="127.0.0.1", peer_timeout=0.5)
        connection.send(queue.handle())
        queue.wait_ready(PATIENCE)
        queue.put("hello", PATIENCE)
        signal.pause()

    with children(write) as (child,):
        reader = attach(child.received())
        assert reader.get(PATIENCE) == "hello"
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(DeadWriter, match="connection to the writer is lost"):
            reader.get(PATIENCE)
        reader.close()


def test_a_busy_reader_is_not_dead() -> None:
    """It holds the interpreter and computes for several peer timeouts: ZeroMQ's own thread answers heartbeats."""

    def read(connection: Any) -> None:
        reader = attach(connection.recv())
        connection.send(reader.get(PATIENCE))
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            pow(3, 400_000)  # holds the interpreter for milliseconds
        connection.send(reader.get(PATIENCE))

    queue = MessageQueue.create(0, remote_readers=1, host="127.0.0.1", peer_timeout=0.3)
    with children(read) as (child,):
        child.send(queue.handle())
        queue.wait_ready(PATIENCE)
        queue.put(1, PATIENCE)
        assert child.received() == 1
        for _ in range(8):
            queue.wait_ready(PATIENCE)  # would raise if the reader were taken for dead
            time.sleep(0.1)
        queue.put(2, PATIENCE)
        assert child.received() == 2
        queue.close()


HOSTS = """
import os, pickle, subprocess, sys, threading, time
from pegboard_executor_mp.queue import Closed, MessageQueue, attach

READER = '''
import hashlib, pickle, sys
from pegboard_executor_mp.queue import Closed, attach
reader = attach(pickle.load(sys.stdin.buffer))
try:
    while True:
        message = reader.get(60)
        print(hashlib.sha256(pickle.dumps(message)).hexdigest(), flush=True)
except Closed as error:
    print("closed:", error, flush=True)
'''

def run(*command):
    subprocess.run(command, check=True)

other = subprocess.Popen(["unshare", "-n", "sleep", "300"])
time.sleep(0.3)
there = ["nsenter", "-t", str(other.pid), "-n"]
run("ip", "link", "add", "here", "type", "veth", "peer", "name", "there", "netns", str(other.pid))
run("ip", "addr", "add", "10.9.0.1/24", "dev", "here")
run("ip", "link", "set", "here", "up")
run("ip", "link", "set", "lo", "up")
run(*there, "ip", "addr", "add", "10.9.0.2/24", "dev", "there")
run(*there, "ip", "link", "set", "there", "up")
try:
    import hashlib
    queue = MessageQueue.create(1, remote_readers=2, host="10.9.0.1", peer_timeout=1.0)
    local = attach(queue.handle(0))
    far = []
    for index in (1, 2):
        reader = subprocess.Popen([*there, sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        reader.stdin.write(pickle.dumps(queue.handle(index)))
        reader.stdin.close()
        far.append(reader)
    queue.wait_ready(60)
    for number in range(100):
        message = (number, os.urandom(number * number * 100))
        expected = hashlib.sha256(pickle.dumps(message)).hexdigest()
        putting = threading.Thread(target=queue.put, args=(message, 60))
        putting.start()
        assert local.get(60) == message
        putting.join()
        assert [reader.stdout.readline().decode().strip() for reader in far] == [expected] * 2
    run("ip", "link", "set", "here", "down")  # the cable is pulled
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                queue.put(b"x", 0.1)
            except TimeoutError:
                pass
        print("the writer did not notice")
    except Closed as error:
        print("writer:", error)
    for reader in far:
        lines = reader.stdout.read().decode().splitlines()
        print(lines[-1])
finally:
    other.kill()
"""


def test_two_hosts() -> None:
    """Network namespaces joined by a virtual cable."""
    tools = all(map(shutil.which, ("unshare", "nsenter", "ip")))
    if not tools or subprocess.run(["unshare", "-Urn", "true"], capture_output=True).returncode:
        pytest.skip("network namespaces are not permitted here")
    done = subprocess.run(["unshare", "-Urn", sys.executable, "-"], input=textwrap.dedent(HOSTS), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("writer: reader ")
    assert "can't be reached any more" in first
    assert rest == ["closed: the connection to the writer is lost"] * 2
