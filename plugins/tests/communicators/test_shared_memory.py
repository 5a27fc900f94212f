"""What SharedMemoryCommunicator promises beyond the contract, over real processes."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.contracts.communicator import CommunicatorError
from pegboard.testing import communicator_jobs as jobs
from pegboard.testing.communicator_jobs import Member, failure, part
from pegboard.testing.conformance.communicator import PATIENCE, shared_pool
from pegboard.testing.rank_pool import RankPool

TARGET = "pegboard_plugins.communicators.shared_memory:SharedMemoryCommunicator"
CPU = torch.device("cpu")


@pytest.fixture
def pool() -> RankPool:
    return shared_pool()


def run(pool: RankPool, folder: Path, world_size: int, job: Any, *args: Any, **more: Any) -> list[Any]:
    members = [Member(TARGET, rank, world_size, str(folder), **more) for rank in range(world_size)]
    return pool.run([(jobs.use, member, job, *args) for member in members], PATIENCE)


def _sums(comm: Any, _: Any, shapes: list[tuple[int, ...]]) -> None:
    for shape in shapes:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            parts = [part(5, rank, shape, dtype) for rank in range(comm.world_size)]
            wanted = parts[0].float().clone()
            for other in parts[1:]:
                wanted += other.float()
            assert torch.equal(comm.all_reduce(parts[comm.rank].clone()), wanted.to(dtype)), (shape, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_go_in_rank_order_in_float32_and_are_rounded_once(pool: RankPool, tmp_path: Path, world_size: int) -> None:
    run(pool, tmp_path, world_size, _sums, [(1, 576), (32, 577), (300, 577), (700, 600)])


def _disagreement(comm: Any, _: Any, number: int) -> str:
    different = [
        (lambda: comm.all_reduce(torch.zeros(9)), lambda: comm.all_gather(torch.zeros(9))),
        (lambda: comm.all_reduce(torch.zeros(9)), lambda: comm.all_reduce(torch.zeros(10))),
        (lambda: comm.all_reduce(torch.zeros(9)), lambda: comm.all_reduce(torch.zeros(9, dtype=torch.int32))),
        (lambda: comm.all_gather(torch.zeros(3, 3), 0), lambda: comm.all_gather(torch.zeros(3, 3), 1)),
        (lambda: comm.barrier(), lambda: comm.all_reduce(torch.zeros(9))),
        (lambda: [comm.send(torch.zeros(9), 1), comm.barrier()], lambda: comm.recv(torch.zeros(8), 0)),
    ]
    return failure(different[number][comm.rank])[1]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
def test_ranks_that_do_different_things_notice(pool: RankPool, tmp_path: Path, number: int) -> None:
    texts = run(pool, tmp_path, 2, _disagreement, number)
    assert re.search("group 'tp0': rank 1 is at .* but rank 0 at ", texts[1])


def _mistakes(comm: Any, _: Any) -> None:
    with pytest.raises(TypeError, match=r"all_reduce of torch\.bool"):
        comm.all_reduce(torch.zeros(3, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"all_reduce of torch\.bool"):
        comm.all_reduce(torch.zeros(2_000_000, dtype=torch.bool))
    with pytest.raises(IndexError, match="dimension 2"):
        comm.all_gather(torch.zeros(3, 3), 2)
    with pytest.raises(ValueError, match="meta"):
        comm.all_reduce(torch.zeros(3, device="meta"))
    assert comm.all_reduce(torch.ones(3)).tolist() == [2, 2, 2], "mistakes that are noticed in time leave the group as it is"


@pytest.mark.slow
def test_mistakes_are_refused_before_anything_is_sent(pool: RankPool, tmp_path: Path) -> None:
    run(pool, tmp_path, 2, _mistakes)


def _modes(member: Member) -> None:
    with torch.inference_mode():
        comm = member.make()
        comm.all_reduce(torch.ones(3))
    assert comm.all_reduce(torch.ones(3)).tolist() == [2, 2, 2]
    assert comm.all_gather(torch.ones(3)).tolist() == [1] * 6
    comm.close()


@pytest.mark.slow
def test_works_in_and_out_of_inference_mode(pool: RankPool, tmp_path: Path) -> None:
    pool.run([(_modes, Member(TARGET, rank, 2, str(tmp_path))) for rank in range(2)], PATIENCE)


def _memory(comm: Any, _: Any, folder: str) -> tuple[list[str], list[str]]:
    comm.barrier()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "pegboard-communicator" in line]
    files = os.listdir(folder)
    comm.barrier()
    comm.close()
    return maps, files


@pytest.mark.slow
def test_memory_has_no_name(pool: RankPool, tmp_path: Path) -> None:
    for maps, files in run(pool, tmp_path, 2, _memory, str(tmp_path)):
        assert files == []
        assert all("memfd" in line and "deleted" in line for line in maps), maps


def _sleepers(member: Member, count: int) -> tuple[int, float]:
    """Every wait is a sleep that nothing but its waker ends. How many there were, and the processor's share of a long one."""
    from pegboard_plugins.communicators import waiting

    slept, original, sleeps = waiting.SLICE_SECONDS, waiting.futex_wait, 0

    def counting(*args: Any) -> None:
        nonlocal sleeps
        sleeps += 1
        original(*args)

    waiting.SLICE_SECONDS, waiting.futex_wait = 1000.0, counting
    comm: Any = member.make()
    comm._waiter._yield = lambda indices, value: False
    try:
        for number in range(count):
            comm.barrier()
            if number % 2 == 0 and comm.rank == 0:
                comm.send(torch.ones(3), 1)
            elif number % 2 == 0 and comm.rank == 1:
                comm.recv(torch.zeros(3), 0)
        began, cpu = time.monotonic(), time.process_time()
        if comm.rank == 0:
            time.sleep(1.0)
        comm.barrier()
        return sleeps, (time.process_time() - cpu) / (time.monotonic() - began)
    finally:
        comm.close()
        waiting.SLICE_SECONDS, waiting.futex_wait = slept, original


@pytest.mark.slow
def test_no_wake_up_is_lost_and_waiting_takes_no_processor(pool: RankPool, tmp_path: Path) -> None:
    members = [Member(TARGET, rank, 3, str(tmp_path)) for rank in range(3)]
    found = pool.run([(_sleepers, member, 2000) for member in members], PATIENCE)
    assert sum(sleeps for sleeps, _ in found) > 1000
    assert max(share for _, share in found) < 0.5


def _closed_meanwhile(comm: Any, _: Any) -> str:
    comm.barrier()
    if comm.rank:
        time.sleep(1.0)
        return ""
    threading.Timer(0.2, comm.close).start()
    return failure(comm.barrier)[1]


def _interrupted(comm: Any, _: Any) -> str:
    comm.barrier()
    if comm.rank:
        return failure(comm.barrier)[1]
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        comm.recv(torch.zeros(3), 1)
    return failure(comm.barrier)[1]


@pytest.mark.slow
def test_close_ends_what_waits(pool: RankPool, tmp_path: Path) -> None:
    assert "closed while" in run(pool, tmp_path, 2, _closed_meanwhile)[0]


@pytest.mark.slow
def test_an_interrupt_ends_a_wait_and_the_group(pool: RankPool, tmp_path: Path) -> None:
    own, other = run(pool, tmp_path, 2, _interrupted)
    assert "KeyboardInterrupt" in own
    assert "rank 0" in other
    assert "left the group" in other


@pytest.mark.slow
def test_ranks_must_agree_about_the_layout(pool: RankPool, tmp_path: Path) -> None:
    members = [Member(TARGET, rank, 2, str(tmp_path), timeout=2.0, options={"slot_bytes": 1024 << rank}) for rank in range(2)]
    texts = [text for _, text, _ in pool.run([(jobs.make_alone, member) for member in members], PATIENCE)]
    assert "slot_bytes" in texts[1]
    assert "missing are [1]" in texts[0]


@pytest.mark.slow
def test_a_record_of_an_earlier_process_is_passed_over(pool: RankPool, tmp_path: Path) -> None:
    """Rank 0 was killed while it waited for the others; everybody is started again."""
    first = Member(TARGET, 0, 2, str(tmp_path))
    (outcome,) = pool.outcomes([(_killed_while_it_waits, first)], PATIENCE)
    assert outcome.signal == signal.SIGKILL
    assert (tmp_path / "tp0.json").exists()
    assert len(set(run(pool, tmp_path, 2, jobs.random_operations, 1, 10))) == 1
    assert list(tmp_path.iterdir()) == []


def _killed_while_it_waits(member: Member) -> None:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    member.make()


# -- refusals, in this process -------------------------------------------------------------------------------------------


def make(**changes: Any) -> Any:
    from pegboard_plugins.communicators.shared_memory import SharedMemoryCommunicator

    arguments = {"rank": 0, "world_size": 2, "group": "tp0", "rendezvous": "/tmp", "device": CPU, "timeout": 0.2}
    return SharedMemoryCommunicator(**(arguments | changes))


def test_refuses_other_devices() -> None:
    with pytest.raises(ValueError, match=r"not of cuda:0; .*torch_distributed"):
        make(device=torch.device("cuda", 0))


@pytest.mark.parametrize("size", [0, -16, 24])
def test_refuses_slots_that_do_not_hold_every_dtype(size: int) -> None:
    with pytest.raises(ValueError, match=f"slot_bytes {size}"):
        make(slot_bytes=size)


def test_refuses_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CommunicatorError, match="nowhere"):
        make(rendezvous=str(tmp_path / "nowhere"))


def test_refuses_ranks_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "tp0.json").write_text('{"process": ["another host", 1, 5], "file": 3, "layout": 1}')
    with pytest.raises(CommunicatorError, match="another host or in another container"):
        make(rank=1, rendezvous=str(tmp_path))


def test_refuses_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    from pegboard_plugins.communicators import waiting

    monkeypatch.setattr(waiting, "_FUTEX", None)
    with pytest.raises(ValueError, match="needs Linux on x86-64 or arm64"):
        make()
