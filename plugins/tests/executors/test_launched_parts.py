"""Parts of the external launcher's executor by themselves: points, calls, connections, the folder."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.contracts.executor import ExecutorFailed, WorkerError
from pegboard.wire import GrammarOutput, ModelRunnerOutput, NewRequestData, SamplingParams, SchedulerOutput
from pegboard_plugins.communicators.peers import Process
from pegboard_plugins.executors.launched import folder, points
from pegboard_plugins.executors.launched.calls import Call, Calls
from pegboard_plugins.executors.launched.connections import Connections
from pegboard_plugins.executors.launched.meeting import Peer
from pegboard_plugins.executors.launched.points import DriftError, Point

PATIENCE = 30.0


# -- points --------------------------------------------------------------------------------------------------------------


def new_request(token_ids: list[int], **sampling: Any) -> NewRequestData:
    params = SamplingParams(seed=1, logit_bias={5: 1.0}, **sampling)
    return NewRequestData(
        slot=0, request_id="a", token_ids=token_ids, prompt_len=3, sampling=params, stop_token_ids=[2], block_ids=[[1]]
    )


def plan(**changes: Any) -> SchedulerOutput:
    fields: dict[str, Any] = {"step_id": 4, "slots": [0], "num_scheduled_tokens": [3], "num_computed_tokens": [0]}
    return SchedulerOutput(**{**fields, "num_to_sample": [1], "new_requests": [new_request([5, 6, 7])], **changes})


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"new_requests": [new_request([5, 6, 8])]}, "new_requests"),
        ({"new_requests": [new_request([5, 6, 7], top_p=0.5)]}, "new_requests"),
        ({"num_computed_tokens": [16]}, "num_computed_tokens"),
        ({"finished_slots": [1]}, "finished_slots"),
        ({"block_copies": [(1, 2)], "num_to_sample": [0]}, "num_to_sample, block_copies"),
        ({"ext": {"plugin": object}}, "ext"),
    ],
)
def test_every_field_of_a_plan_counts(changes: dict[str, Any], differing: str) -> None:
    assert points.of_plan(plan()) == points.of_plan(plan())
    error = points.drift({0: points.of_plan(plan()), 1: points.of_plan(plan(**changes)), 2: points.of_plan(plan())})
    assert "ranks 0, 2 are at step 4 (1 request, 3 tokens); rank 1 is at step 4 (1 request, 3 tokens)" in str(error)
    assert f"; what differs: {differing};" in str(error)


def test_masks_and_tokens_count() -> None:
    mask = GrammarOutput(step_id=4, slots=[0], bitmask=b"\1\2\3\4")
    other = GrammarOutput(step_id=4, slots=[0], bitmask=b"\1\2\3\5")
    assert "what differs: bitmask" in str(points.drift({0: points.of_grammar(mask), 1: points.of_grammar(other)}))
    one, two = (ModelRunnerOutput(step_id=4, slots=[0], sampled_token_ids=[[token]]) for token in (7, 8))
    assert points.of_output(one) != points.of_output(two)
    assert points.of_output(None) == points.of_output(None)


# -- calls ---------------------------------------------------------------------------------------------------------------


class Bus:
    """Ranks in one thread: messages wait, those of one rank to another in order, until ``deliver`` brings one."""

    def __init__(self, size: int, choose: random.Random) -> None:
        self._choose = choose
        self.links: dict[tuple[int, int], deque[Any]] = {(a, b): deque() for a in range(size) for b in range(size) if a != b}
        self.ranks = [Calls(rank, size, self._sender(rank), lambda error: None) for rank in range(size)]
        self.work: list[tuple[Calls, Call, Any]] = []

    def _sender(self, rank: int) -> Any:
        return lambda message: [link.append(message) for (a, _), link in self.links.items() if a == rank]

    def act(self) -> bool:
        """Deliver one message, or let one worker answer; False when there is nothing to do."""
        possible: list[Any] = [key for key, link in self.links.items() if link] + list(range(len(self.work)))
        if not possible:
            return False
        chosen = self._choose.choice(possible)
        if isinstance(chosen, tuple):
            self.ranks[chosen[1]].hear(chosen[0], self.links[chosen].popleft())
        else:
            calls, call, outcome = self.work.pop(chosen)
            error = outcome if isinstance(outcome, WorkerError) else None
            calls.answer(call, None if error else outcome, None if error else outcome, error)
        return True


KINDS = st.sampled_from(["gather", "step", "call", "timed", "fails", "some"])


@given(size=st.integers(1, 4), kinds=st.lists(KINDS, max_size=6), seed=st.integers(0, 2**32))
def test_all_ranks_end_calls_alike(size: int, kinds: list[str], seed: int) -> None:
    """However messages overtake one another, and whenever rank 0 loses patience."""
    choose = random.Random(seed)
    bus = Bus(size, choose)
    futures: list[list[Future[Any]]] = [[] for _ in range(size)]
    left = [list(enumerate(kinds)) for _ in range(size)]
    failing = choose.randrange(size)

    def begin(rank: int) -> None:
        number, kind = left[rank].pop(0)
        calls = bus.ranks[rank]
        asked = () if kind == "gather" else (size - 1,) if kind == "some" else range(size)
        outcome = WorkerError(rank, "E", "x") if kind == "fails" and rank == failing else (number, rank)
        how: dict[str, Any] = {"limit": 0.0, "limit_is_common": True} if kind == "timed" else {}
        if rank in asked:
            how["run"] = lambda call: bus.work.append((calls, call, outcome))
        call = calls.begin(Point(f"{number} {kind}", {}), value=(number, rank), asked=asked, finish=dict, **how)
        futures[rank].append(call.future)

    while any(left) or bus.act():
        ready = [rank for rank in range(size) if left[rank]]
        if ready and choose.random() < 0.5:
            begin(choose.choice(ready))
        elif choose.random() < 0.1:
            bus.ranks[0].expire()
        else:
            bus.act()
    for number, kind in enumerate(kinds):
        ended = [futures[rank][number] for rank in range(size)]
        assert all(future.done() for future in ended)
        told = [str(future.exception()) if future.exception() else future.result() for future in ended]
        assert all(each == told[0] for each in told)
        if kind in ("gather", "step", "call", "some"):
            members = (size - 1,) if kind == "some" else range(size)
            assert told[0] == {rank: (number, rank) for rank in members}
        elif kind == "fails":
            assert told[0] == f"worker rank {failing} failed: E: x"
    assert not any(calls._open for calls in bus.ranks)


def test_a_late_call_still_runs_everywhere() -> None:
    """Its method may need all ranks."""
    bus = Bus(2, random.Random(0))
    ran: list[int] = []

    def begin(rank: int) -> Call:
        how = {"limit": 0.0, "limit_is_common": True, "run": lambda call: ran.append(rank)}
        return bus.ranks[rank].begin(Point("a call", {}), asked=(0, 1), finish=dict, **how)

    first = begin(0)
    bus.ranks[0].expire()
    assert str(first.future.exception()) == "a call: no answer from rank 1 within 0.0 s"
    while bus.act():
        pass
    second = begin(1)
    assert str(second.future.exception()) == str(first.future.exception())
    while bus.act():
        pass
    assert sorted(ran) == [0, 1]


def test_a_refused_book_takes_no_calls() -> None:
    bus = Bus(2, random.Random(0))
    call = bus.ranks[0].begin(Point("a call", {}), finish=dict)
    waiting = bus.ranks[0].oldest()
    assert waiting is not None
    assert (waiting.what, waiting.ranks) == ("a call", {1})
    assert re.fullmatch(r"no answer from rank 1 for \d+\.\d s: a call", str(waiting))
    bus.ranks[0].refuse(ExecutorFailed("why"))
    with pytest.raises(ExecutorFailed, match="why"):
        call.future.result(0)
    with pytest.raises(ExecutorFailed, match="why"):
        bus.ranks[0].begin(Point("another", {}), finish=dict)


def test_answers_that_differ_are_fatal() -> None:
    told: list[BaseException] = []

    def finish(answers: dict[int, Any]) -> Any:
        raise DriftError("apart")

    calls = Calls(0, 1, lambda message: None, told.append)
    call = calls.begin(Point("a step", {}), asked=(0,), finish=finish)
    calls.answer(call, 1, 1, None)
    assert [str(error) for error in told] == ["apart"]
    with pytest.raises(DriftError):
        call.future.result(0)


# -- connections ---------------------------------------------------------------------------------------------------------


class Heard:
    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.lost = threading.Event()
        self.arrived = threading.Condition()

    def hear(self, rank: int, message: Any) -> None:
        with self.arrived:
            self.messages.append(message)
            self.arrived.notify_all()

    def lose(self, rank: int) -> None:
        self.lost.set()

    def look(self) -> float | None:
        return None

    def wait_for(self, count: int) -> list[Any]:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.messages) >= count, PATIENCE)
            return self.messages


def connected() -> tuple[Connections, Heard, Connections, Heard]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    pair: list[Any] = []
    for rank, end in enumerate(ends):
        heard = Heard()
        connections = Connections({1 - rank: Peer(end, Process.current(), "here")})
        connections.start(heard)
        pair += [connections, heard]
    return pair[0], pair[1], pair[2], pair[3]


def test_large_messages_both_ways_at_once() -> None:
    """More than any buffer holds, from both, who wait for nothing."""
    one, heard_by_one, two, heard_by_two = connected()
    large = os.urandom(20 << 20)
    for connections in (one, two):
        connections.send(("large", large))
        connections.send("small")
    assert heard_by_one.wait_for(2) == heard_by_two.wait_for(2) == [("large", large), "small"]
    one.close()
    two.close()


def test_messages_of_many_threads_stay_whole_and_in_order() -> None:
    one, _, two, heard = connected()

    def talk(name: int) -> None:
        for number in range(200):
            one.send((name, number, bytes(number * 7)))

    threads = [threading.Thread(target=talk, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    messages = heard.wait_for(800)
    for name in range(4):
        assert [number for who, number, _ in messages if who == name] == list(range(200))
    assert all(len(data) == number * 7 for _, number, data in messages)
    one.close()
    two.close()


def test_what_was_sent_arrives_before_the_end_is_noticed() -> None:
    one, _, two, heard = connected()
    one.send(bytes(5 << 20))
    one.send("last")
    one.close()
    assert heard.lost.wait(PATIENCE)
    assert heard.messages[-1] == "last"
    two.send("to nobody")
    two.close()
    two.close()


# -- the folder ----------------------------------------------------------------------------------------------------------


def test_folders_of_processes_that_were_killed_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(folder, "_DIRECTORY", str(tmp_path))
    script = (
        "import os, sys; from pegboard_plugins.executors.launched import folder; folder._DIRECTORY = sys.argv[1]\n"
        "print(folder.make_folder(), flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    left = Path(done.stdout.strip())
    assert left.is_dir()
    for odd in ("odd", "1", "-1-x-y"):
        (tmp_path / f"{folder._own_prefix()}{odd}").mkdir()
    first, second = folder.make_folder(), folder.make_folder()
    assert not left.exists()
    assert Path(first).is_dir(), "its process lives"
    for name in (first, second, second):
        folder.remove_folder(name)
    assert not Path(first).exists()
