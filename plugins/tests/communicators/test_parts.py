"""Parts of communicators: processes, rendezvous, pieces, signatures."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from pegboard.contracts.communicator import CommunicatorError, CommunicatorTimeout
from pegboard_plugins.communicators import rendezvous, signatures, waiting
from pegboard_plugins.communicators.fences import make_fence
from pegboard_plugins.communicators.peers import Process, this_host
from pegboard_plugins.communicators.segment import Segment, new_file
from pegboard_plugins.communicators.shared_memory import _blocks
from pegboard_plugins.communicators.sums import adder


def _child() -> tuple[subprocess.Popen[bytes], Process]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stat = Path(f"/proc/{child.pid}/stat").read_text()
    return child, Process(this_host(), child.pid, int(stat.rpartition(")")[2].split()[19]))


def test_a_process_has_ended_before_anybody_waits_for_it() -> None:
    assert not Process.current().has_ended()
    child, process = _child()
    assert not process.has_ended()
    child.kill()
    end = time.monotonic() + 30
    while not process.has_ended():
        assert time.monotonic() < end
        time.sleep(0.01)
    child.wait()
    assert process.has_ended()


def test_a_process_id_that_is_used_again_is_another_process() -> None:
    now = Process.current()
    assert now._replace(started=now.started - 1).has_ended()
    assert not now._replace(host="elsewhere", pid=1 << 22).has_ended(), "unknown is not ended"


def test_spinning_depends_on_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Process.current()
    cores = {0, 1}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    monkeypatch.setattr(waiting, "usable_cores", lambda: len(cores))
    assert waiting.spin_seconds([here] * 2) == waiting.SPIN_SECONDS
    assert waiting.spin_seconds([here] * 3) == waiting.CROWDED_SPIN_SECONDS
    monkeypatch.setattr(waiting, "usable_cores", lambda: 1)  # a container's quota
    assert waiting.spin_seconds([here] * 2) == waiting.CROWDED_SPIN_SECONDS


def test_ranks_bound_to_a_core_each_have_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {pid % 2})
    monkeypatch.setattr(waiting, "usable_cores", lambda: 1)
    ranks = [Process.current()._replace(pid=pid) for pid in (10, 11)]
    assert waiting.spin_seconds(ranks) == waiting.SPIN_SECONDS


def test_a_futex_wakes() -> None:
    file = new_file()
    segment = Segment(file, 2, 64)
    os.close(file)
    word = segment.asleep(0)
    segment.words[word] = 1
    waiting.futex_wait(segment.address(word), 0, 100.0)  # another value: does not sleep
    waiting.futex_wait(segment.address(word), 1, 0.01)

    def wake() -> None:
        time.sleep(0.05)
        segment.words[word] = 0
        waiting.futex_wake(segment.address(word))

    thread = threading.Thread(target=wake)
    thread.start()
    while segment.words[word]:
        waiting.futex_wait(segment.address(word), 1, 100.0)
    thread.join()


def test_fences_can_be_passed_again_and_again() -> None:
    fence = make_fence()
    for _ in range(3):
        fence()


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_words_and_slots_do_not_overlap(world_size: int) -> None:
    file = new_file()
    segment = Segment(file, world_size, 64)
    os.close(file)
    ranks = range(world_size)
    words = [Segment.OPEN]
    for r in ranks:
        words += [segment.posted(r) + i for i in range(3)] + [segment.asleep(r), segment.left(r)]
        words += [segment.attached(r) + i for i in range(3)]
        words += [segment.sent(r, to) + i for to in ranks for i in range(3)] + [segment.taken(r, source) for source in ranks]
    assert len(set(words)) == len(words)
    assert max(words) < len(segment.words)
    slots = [segment.slot(r, turn) for r in ranks for turn in (0, 1)]
    slots += [segment.mailbox(a, b, turn) for a in ranks for b in ranks for turn in (0, 1)]
    for number, slot in enumerate(slots):
        slot.fill_(number)
    assert all(bool((slot == number).all()) for number, slot in enumerate(slots))
    assert not any(segment.words)


@pytest.mark.parametrize(("rows", "width", "room"), [(1, 1, 4), (5, 3, 4), (5, 3, 7), (2, 9, 4), (3, 4, 4), (7, 2, 100)])
def test_blocks_cover_everything_once(rows: int, width: int, room: int) -> None:
    seen = torch.zeros(rows, width, dtype=torch.int32)
    for row, column in _blocks(rows, width, room):
        assert 0 < seen[row, column].numel() <= room
        seen[row, column] += 1
    assert bool((seen == 1).all())


def test_signatures_tell_what_they_stand_for() -> None:
    contents = signatures.contents(torch.zeros(4, 9, dtype=torch.bfloat16))
    assert signatures.describe(contents | signatures.ALL_REDUCE) == "all_reduce of 36 x torch.bfloat16"
    gather = contents | signatures.ALL_GATHER | signatures.along(1)
    assert signatures.describe(gather) == "all_gather along dimension 1 of 36 x torch.bfloat16"
    assert signatures.describe(signatures.BARRIER) == "barrier"
    assert signatures.describe(0) == "nothing known"
    with pytest.raises(TypeError, match="e4m3fnuz"):
        signatures.contents(torch.zeros(1, dtype=torch.float8_e4m3fnuz))


def test_low_precision_is_rounded_once() -> None:
    """1 + 2^-8 + 2^-8 is a bfloat16, 1 + 2^-8 is none and would be rounded back to 1."""
    parts = [torch.tensor([1.0]), torch.tensor([2.0**-8]), torch.tensor([2.0**-8])]
    add, into = adder(torch.bfloat16, 3), torch.empty(1, dtype=torch.bfloat16)
    assert add is not None
    add([part.bfloat16() for part in parts], into)
    assert into.item() == 1 + 2.0**-7
    assert adder(torch.bool, 2) is None


def test_a_store_listens_where_it_is_told() -> None:
    store = rendezvous.serve("127.0.0.1")
    address = rendezvous.rendezvous_of(store)
    assert address.startswith("tcp://127.0.0.1:")
    listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    (line,) = [line for line in listening.splitlines() if f":{store.port:04X} " in line and " 0A " in line]
    assert f"0100007F:{store.port:04X}" in line
    rendezvous.connect(address, 5.0).set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize("address", ["tcp://", "tcp://host", "tcp://:1", "tcp://host:port"])
def test_malformed_addresses(address: str) -> None:
    with pytest.raises(ValueError, match="must be a folder or tcp://host:port"):
        rendezvous.meet(address, "tp0", 1.0)


def test_nobody_answers() -> None:
    store = rendezvous.serve("127.0.0.1")
    address = rendezvous.rendezvous_of(store)
    del store
    with pytest.raises(CommunicatorTimeout, match="no store answers"):
        rendezvous.meet(address, "tp0", 0.3)


def test_a_folder_that_is_lost_ends_the_meeting(tmp_path: Path) -> None:
    """Ranks must not wait until their time is up for somebody who can't come."""
    folder = tmp_path / "meeting"
    folder.mkdir()
    meetings = [rendezvous.meet(str(folder), "tp0", 1000.0) for _ in range(2)]
    threading.Timer(0.1, folder.rmdir).start()
    with pytest.raises(CommunicatorError, match="meeting' is no folder"):
        meetings[1].find("rank 1", time.monotonic() + 1000.0)
    with pytest.raises(CommunicatorError, match="cannot write to the rendezvous"):
        meetings[0].offer({"process": Process.current()})
    meetings[0].withdraw()


def test_no_rendezvous_is_not_the_folder_where_one_happens_to_be() -> None:
    with pytest.raises(ValueError, match="several ranks need a rendezvous"):
        rendezvous.meet("", "tp0", 1.0)
