"""The segment: room checked and reserved, nothing left behind, whoever is killed."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pegboard.testing.processes import PATIENCE, children
from pegboard_executor_mp.queue import Closed, DeadReader, DeadWriter, Handle, HandleRefused, MessageQueue, NoSharedMemory, attach
from pegboard_executor_mp.queue import segment as segments
from pegboard_executor_mp.queue.liveness import pid_namespace


def names(pid: int | None = None) -> set[str]:
    """Of the queues that process ``pid`` made and that have not been unlinked."""
    return {path.name for path in Path(segments.DIRECTORY).glob(f"{segments.PREFIX}{os.getpid() if pid is None else pid}-*")}


def eventually(condition: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_more_than_there_is() -> None:
    with pytest.raises(NoSharedMemory, match=r"needs \d+ bytes of shared memory, /dev/shm has \d+ bytes free: lower my.setting"):
        MessageQueue.create(1, chunk_bytes=1 << 40, setting="my.setting")
    assert not names()


def in_small_shm(megabytes: int, script: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` where ``/dev/shm`` has that size."""
    mount = f"mount -t tmpfs -o size={megabytes}m tmpfs /dev/shm && exec {sys.executable} -"
    try:
        allowed = subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("user namespaces are not permitted here")
    return subprocess.run(["unshare", "-Urm", "sh", "-c", mount], input=textwrap.dedent(script), capture_output=True, text=True)


def test_small_shm_is_refused_at_once() -> None:
    done = in_small_shm(
        16,
        """
        from pegboard_executor_mp.queue import MessageQueue
        MessageQueue.create(2, chunk_bytes=8 << 20, num_chunks=3)
        """,
    )
    assert done.returncode == 1
    assert (
        "needs 25169920 bytes of shared memory, /dev/shm has 16777216 bytes free: lower num_chunks or chunk_bytes" in done.stderr
    )


def test_small_shm_is_never_overrun() -> None:
    """Large messages through small rings, in both directions; another process fills the rest of the memory meanwhile."""
    done = in_small_shm(
        16,
        """
        import multiprocessing
        from pegboard_executor_mp.queue import MessageQueue, attach

        def echo(handle, answers):
            reader, writer = attach(handle), MessageQueue.create(1, chunk_bytes=1 << 20, num_chunks=5)
            answers.send(writer.handle())
            for _ in range(102):
                writer.put(reader.get(60), 60)
            writer.close()

        context = multiprocessing.get_context("fork")
        forth = MessageQueue.create(1, chunk_bytes=1 << 20, num_chunks=5)
        here, there = context.Pipe()
        child = context.Process(target=echo, args=(forth.handle(), there))
        child.start()
        back = attach(here.recv())
        forth.wait_ready(60)
        try:
            with open("/dev/shm/rest", "wb") as rest:
                while True:
                    rest.write(bytes(1 << 16))
                    rest.flush()
        except OSError:
            pass
        for size in [1 << 20] * 100 + [0, 30 << 20]:
            blob = bytes(range(256)) * (size // 256)
            forth.put(blob, 60)
            assert back.get(60) == blob
        child.join(60)
        print("survived", child.exitcode)
        """,
    )
    assert done.stdout.strip() == "survived 0", done.stderr


def test_the_name_is_gone_as_soon_as_all_have_attached() -> None:
    queue = MessageQueue.create(2)
    handles = [queue.handle(0), queue.handle(1)]
    assert len(names()) == 1
    readers = [attach(handle) for handle in handles]
    queue.wait_ready(PATIENCE)
    assert not names()
    with pytest.raises(Closed):
        attach(handles[0])
    for end in (*readers, queue):
        end.close()


def test_close_unlinks() -> None:
    queue = MessageQueue.create(2)
    reader = attach(queue.handle(1))
    queue.close()
    queue.close()
    assert not names()
    with pytest.raises(Closed):
        attach(Handle(0, segment=queue.handle(0).segment))
    reader.close()
    reader.close()


def test_forgotten_ends_are_closed() -> None:
    queue = MessageQueue.create(1)
    reader = attach(queue.handle())
    del reader
    gc.collect()
    with pytest.raises(DeadReader):
        queue.put(1)
    queue = MessageQueue.create(1)
    del queue
    gc.collect()
    assert not names()


def test_an_interpreter_that_just_ends_leaves_nothing() -> None:
    script = (
        "from pegboard_executor_mp.queue import *; q = MessageQueue.create(2); r = attach(q.handle(0)); print(q.handle().segment)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0
    assert not done.stderr  # no tracker process complains either
    assert not (Path(segments.DIRECTORY) / done.stdout.strip()).exists()


def make_and_wait(num_readers: int, connection: Any) -> None:
    queue = MessageQueue.create(num_readers)
    connection.send([queue.handle(index) for index in range(num_readers)])
    with contextlib.suppress(TimeoutError):
        queue.wait_ready(PATIENCE)
    time.sleep(PATIENCE)


def test_a_writer_killed_early_leaves_nothing_to_its_readers() -> None:
    with children(partial(make_and_wait, 2)) as (child,):
        handles = child.received()
        reader = attach(handles[0])
        assert len(names(child.pid)) == 1
        child.kill()
        with pytest.raises(DeadWriter, match=f"process {child.process.pid} has ended"):
            reader.get(PATIENCE)
        assert not names(child.process.pid)
        with pytest.raises(Closed):
            attach(handles[1])
        reader.close()


def test_a_late_reader_of_a_killed_writer_unlinks() -> None:
    with children(partial(make_and_wait, 1)) as (child,):
        (handle,) = child.received()
        child.kill()
        with pytest.raises(Closed):
            attach(handle)
        assert not names(child.process.pid)


def test_what_a_killed_writer_left_goes_when_the_next_queue_is_made() -> None:
    """Nobody had attached, and nobody does."""
    with children(partial(make_and_wait, 1), partial(make_and_wait, 1)) as (killed, lives):
        killed.received(), lives.received()
        [left] = names(killed.pid)
        other_namespace, not_ours = left.replace(f"-{pid_namespace()}-", "-1-"), f"{segments.PREFIX}{killed.pid}-mine"
        for name in (other_namespace, not_ours):
            (Path(segments.DIRECTORY) / name).touch()
        killed.process.kill()
        killed.process.join(PATIENCE)
        try:
            assert names(killed.process.pid) == {left, other_namespace, not_ours}
            MessageQueue.create(1).close()
            assert names(killed.process.pid) == {other_namespace, not_ours}
            assert len(names(lives.pid)) == 1, "its maker lives"
        finally:
            segments.unlink(other_namespace)
            segments.unlink(not_ours)


def test_killed_while_copying() -> None:
    """Readers of a writer that was killed in the middle of a message get the whole ones before it."""

    def write(connection: Any) -> None:
        queue = MessageQueue.create(1, chunk_bytes=1024, num_chunks=4)
        connection.send(queue.handle())
        queue.wait_ready(PATIENCE)
        for number in range(10**9):
            queue.put((number, bytes(5000)), PATIENCE)

    with children(write) as (child,):
        reader = attach(child.received())
        number = 0
        for number in range(200):
            assert reader.get(PATIENCE) == (number, bytes(5000))
        child.kill()
        with contextlib.suppress(DeadWriter):
            while number < 10**9:
                number += 1
                assert reader.get(PATIENCE) == (number, bytes(5000))
        with pytest.raises(DeadWriter):
            reader.get(PATIENCE)
        reader.close()


def test_handles() -> None:
    queue = MessageQueue.create(1)
    handle = queue.handle()
    reader = attach(pickle.loads(pickle.dumps(handle)))
    with pytest.raises(HandleRefused, match="attached already"):
        attach(handle)
    with pytest.raises(HandleRefused, match="there is no reader 1"):
        attach(Handle(1, segment=handle.segment))
    with pytest.raises(HandleRefused, match="protocol 99"):
        attach(Handle(0, segment=handle.segment, protocol=99))
    with pytest.raises(ValueError, match="1 local and 0 remote readers, there is no reader 1"):
        queue.handle(1)
    queue._ring._ring.words[1] = 77  # the layout's version
    with pytest.raises(HandleRefused, match="layout 77"):
        attach(handle)
    reader.close()
    queue.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_readers": 0},
        {"chunk_bytes": 1},
        {"num_chunks": 0},
        {"remote_readers": -1},
        {"remote_readers": 1},
        {"first_fragment": -1},
    ],
)
def test_wrong_sizes(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MessageQueue.create(**{"num_readers": 1, **wrong})


def test_a_forked_child_leaves_its_parents_queue_alone() -> None:
    queue = MessageQueue.create(2)
    readers = [attach(queue.handle(index)) for index in range(2)]
    queue.wait_ready(PATIENCE)

    def child(connection: Any) -> None:
        failures = 0
        for call in (partial(queue.put, 1), readers[0].get):
            try:
                call()
            except Closed:
                failures += 1
        for end in (queue, *readers):
            end.close()
        connection.send(failures)

    process = os.fork()
    if not process:  # the real thing: also runs what runs at exit
        failed = 0
        for call in (partial(queue.put, 1), readers[0].get):
            try:
                call()
            except Closed:
                failed += 1
        for end in (queue, *readers):
            end.close()
        gc.collect()
        os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 2
    queue.put("still here", PATIENCE)
    assert [reader.get(PATIENCE) for reader in readers] == ["still here"] * 2
    for end in (queue, *readers):
        end.close()
