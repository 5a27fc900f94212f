"""Any sequence of puts and gets does what a list per reader does."""

from __future__ import annotations

import contextlib
import pickle
import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pegboard_executor_mp.queue import Closed, MessageQueue, attach

CHUNK = 512


class QueueMachine(RuleBasedStateMachine):
    """The ring numbers its fragments from shortly before 2**32, where the words that readers sleep on wrap around."""

    remote = 0

    @initialize(readers=st.integers(1, 3), chunks=st.integers(1, 4), before_wrap=st.integers(0, 20))
    def open(self, readers: int, chunks: int, before_wrap: int) -> None:
        first = 2**32 - before_wrap
        self.chunks = chunks
        self.readers: dict[int, Any] = {}
        self.count = readers
        local = 0 if self.remote else readers
        self.writer = MessageQueue.create(
            local, remote_readers=readers - local, host="127.0.0.1", chunk_bytes=CHUNK, num_chunks=chunks, first_fragment=first
        )
        self.expected: list[list[Any]] = [[] for _ in range(readers)]
        self.used: list[list[int]] = [[] for _ in range(readers)]
        self.remains = [False] * readers
        self.sent = 0

    @rule(data=st.data())
    def attach_one(self, data: Any) -> None:
        absent = [index for index in range(self.count) if index not in self.readers]
        if absent:
            index = data.draw(st.sampled_from(absent))
            self.readers[index] = attach(self.writer.handle(index))

    @rule(size=st.integers(0, 3 * CHUNK))
    def put(self, size: int) -> None:
        message = (self.sent, random.Random(size).randbytes(size))
        fragments = -(-len(pickle.dumps(message, 5)) // CHUNK)
        fits = not any(self.remains) and all(sum(used) + fragments <= self.chunks for used in self.used)
        try:
            self.writer.put(message, 0.5 if fits else 0.01)
        except TimeoutError:
            assert not fits or self.remote, "there was room"
            if fragments > 1:
                self.remains = [True] * self.count  # of what was begun and given up
            return
        self.sent += 1
        for expected, used in zip(self.expected, self.used, strict=True):
            expected.append(message)
            used.append(fragments)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def get(self, data: Any) -> None:
        index = data.draw(st.sampled_from(sorted(self.readers)))
        expected = self.expected[index]
        if expected:
            if self.remote:  # its writer answers who attached while it is called
                with contextlib.suppress(TimeoutError):
                    self.writer.wait_ready(0.05)
            assert self.readers[index].get(10) == expected.pop(0)
            self.used[index].pop(0)
        else:
            with pytest.raises(TimeoutError):
                self.readers[index].get(0.002)
            self.remains[index] = False

    def teardown(self) -> None:
        if not hasattr(self, "writer"):
            return
        if len(self.readers) == self.count:
            self.writer.wait_ready(10)
        self.writer.close()
        for index, reader in self.readers.items():
            if not self.remote:
                for message in self.expected[index]:
                    assert reader.get(10) == message
                with pytest.raises(Closed):
                    reader.get(10)
            reader.close()


class RemoteQueueMachine(QueueMachine):
    remote = 1


TestLocal = QueueMachine.TestCase
TestLocal.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRemote = RemoteQueueMachine.TestCase
TestRemote.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
