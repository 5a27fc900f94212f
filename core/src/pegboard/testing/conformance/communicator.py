"""What every communicator must keep, over real processes. Subclass ``CommunicatorConformance``, give ``target``.

``CommunicatorResults`` is its first half, for further settings of the same communicator.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pegboard.testing import communicator_jobs as jobs
from pegboard.testing.communicator_jobs import FLOATS, INTEGERS, SHAPES, Failure, Member
from pegboard.testing.rank_pool import Outcome, RankPool

PATIENCE = 120.0
"""Seconds after which ranks count as hung."""
TIMEOUT = 30.0
"""Of a group that loses a rank: it must notice earlier."""

_pools: list[RankPool] = []


def shared_pool() -> RankPool:
    """Four ranks that all tests of a session use."""
    if not _pools:
        _pools.append(RankPool(4, preload=("torch", jobs.__name__)))
    return _pools[0]


class CommunicatorResults:
    """What comes out of operations."""

    target: ClassVar[str]
    """Import path ``module:class``."""
    options: ClassVar[dict[str, Any]] = {}
    """Further arguments of the constructor."""
    device: ClassVar[str] = "cpu"
    large: ClassVar[tuple[int, int]] = (600, 1000)
    """A shape that does not fit into the communicator's buffers."""

    @pytest.fixture
    def pool(self) -> RankPool:
        return shared_pool()

    def member(self, rank: int, world_size: int, folder: Path | str, **more: Any) -> Member:
        return Member(self.target, rank, world_size, str(folder), device=self.device, options=self.options, **more)

    def run(
        self, pool: RankPool, folder: Path | str, world_size: int, job: Callable[..., Any], *args: Any, **more: Any
    ) -> list[Any]:
        """``job(communicator, device, *args)`` on every rank of a new group."""
        members = [self.member(rank, world_size, folder, **more) for rank in range(world_size)]
        return pool.run([(jobs.use, member, job, *args) for member in members], PATIENCE)

    @pytest.mark.parametrize("world_size", [1, 2, 3, 4])
    def test_all_reduce(self, pool: RankPool, tmp_path: Path, world_size: int) -> None:
        found = self.run(pool, tmp_path, world_size, jobs.all_reduce, list(SHAPES), [*FLOATS, *INTEGERS])
        assert all(seen == found[0] for seen in found), "ranks differ in their bits"

    @pytest.mark.parametrize("world_size", [2, 3, 4])
    def test_all_reduce_of_large_tensors(self, pool: RankPool, tmp_path: Path, world_size: int) -> None:
        shapes = [self.large, (self.large[0], 577)]
        found = self.run(pool, tmp_path, world_size, jobs.all_reduce, shapes, [torch.float32, torch.bfloat16])
        assert all(seen == found[0] for seen in found), "ranks differ in their bits"

    @pytest.mark.parametrize("world_size", [1, 2, 3, 4])
    def test_all_gather(self, pool: RankPool, tmp_path: Path, world_size: int) -> None:
        self.run(pool, tmp_path, world_size, jobs.all_gather, list(SHAPES), [*FLOATS, *INTEGERS, torch.bool])

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_all_gather_of_large_tensors(self, pool: RankPool, tmp_path: Path, world_size: int) -> None:
        shapes: list[tuple[int, ...]] = [self.large, (1, self.large[0] * self.large[1]), (3, self.large[0], 301)]
        self.run(pool, tmp_path, world_size, jobs.all_gather, shapes, [torch.float32])

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_messages(self, pool: RankPool, tmp_path: Path, world_size: int) -> None:
        shapes = [*SHAPES, self.large]
        self.run(pool, tmp_path, world_size, jobs.messages, shapes, [*FLOATS, torch.int64, torch.bool])

    @pytest.mark.parametrize(("world_size", "count"), [(1, 100), (2, 300), (3, 1000), (4, 300)])
    def test_random_operations(self, pool: RankPool, tmp_path: Path, world_size: int, count: int) -> None:
        found = self.run(pool, tmp_path, world_size, jobs.random_operations, 17, count)
        assert len(set(found)) == 1, "ranks differ in their bits"


class CommunicatorConformance(CommunicatorResults):
    """The contract of ``pegboard.contracts.communicator``, as tests."""

    # -- groups ------------------------------------------------------------------------------------------------------

    def test_a_group_of_one_meets_nobody(self, pool: RankPool) -> None:
        self.run(pool, "/does/not/exist", 1, jobs.all_reduce, [(3, 5)], [torch.float32])

    def test_two_groups_at_once(self, pool: RankPool, tmp_path: Path) -> None:
        """Tensor and pipeline parallelism: four ranks, each in two groups of two."""
        calls: list[tuple[Any, ...]] = []
        for rank in range(4):
            tp = self.member(rank % 2, 2, tmp_path, group=f"tp{rank // 2}")
            calls.append((jobs.two_groups, tp, self.member(rank // 2, 2, tmp_path, group=f"pp{rank % 2}")))
        found = pool.run(calls, PATIENCE)
        assert all(seen == found[0] for seen in found)

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_a_group_can_be_made_again(self, pool: RankPool, tmp_path: Path, world_size: int) -> None:
        members = [self.member(rank, world_size, tmp_path) for rank in range(world_size)]
        for first, last in pool.run([(jobs.made_again, member, 20) for member in members], PATIENCE):
            assert all(after <= before + 2 for before, after in zip(first, last, strict=True)), "files or threads are left"
        assert list(tmp_path.iterdir()) == []

    def test_meets_at_a_store(self, pool: RankPool) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _ in range(2):
            found = self.run(pool, f"tcp://127.0.0.1:{store.port}", 3, jobs.random_operations, 3, 30)
            assert len(set(found)) == 1

    # -- failures ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_rank_that_never_comes(self, pool: RankPool, tmp_path: Path, rank: int) -> None:
        (found,) = pool.run([(jobs.make_alone, self.member(rank, 2, tmp_path, timeout=1.0))], PATIENCE)
        self._check_failure(found, rank, "CommunicatorTimeout")

    @pytest.mark.parametrize("victim", [0, 2])
    def test_a_killed_rank(self, pool: RankPool, tmp_path: Path, victim: int) -> None:
        members = [self.member(rank, 3, tmp_path, timeout=TIMEOUT) for rank in range(3)]
        outcomes = pool.outcomes([(jobs.survive, member, victim) for member in members], PATIENCE)
        for rank, failures in self._survivors(outcomes, victim):
            for number, failure in enumerate(failures):
                self._check_failure(failure, rank, "PeerLost", group="")
                assert f"rank {victim}" in failure[1], (number, failure)

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_a_rank_killed_in_the_middle(self, pool: RankPool, tmp_path: Path, world_size: int) -> None:
        members = [self.member(rank, world_size, tmp_path, timeout=TIMEOUT) for rank in range(world_size)]
        outcomes = pool.outcomes([(jobs.use, member, jobs.endless, 1, 0.4) for member in members], PATIENCE)
        for rank, failure in self._survivors(outcomes, 1):
            self._check_failure(failure, rank, "PeerLost")

    def test_a_rank_that_hangs(self, pool: RankPool, tmp_path: Path) -> None:
        found = self.run(pool, tmp_path, 3, jobs.late, str(tmp_path), timeout=2.0)
        for rank, failures in enumerate(found):
            for failure in failures:
                self._check_failure(failure, rank, "CommunicatorTimeout" if rank < 2 else "CommunicatorError")

    def test_a_rank_that_leaves(self, pool: RankPool, tmp_path: Path) -> None:
        found = self.run(pool, tmp_path, 3, jobs.leave, timeout=TIMEOUT)
        for rank in (0, 1):
            self._check_failure(found[rank], rank, "PeerLost")

    def test_after_close(self, pool: RankPool, tmp_path: Path) -> None:
        self.run(pool, tmp_path, 2, _closed)

    @pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
    def test_impossible_ranks(self, pool: RankPool, tmp_path: Path, rank: int, world_size: int) -> None:
        (outcome,) = pool.outcomes([(jobs.make_alone, self.member(rank, world_size, tmp_path, timeout=1.0))], PATIENCE)
        assert "ValueError" in str(outcome.error)
        assert "tp0" in str(outcome.error)

    def test_messages_to_nobody(self, pool: RankPool, tmp_path: Path) -> None:
        self.run(pool, tmp_path, 2, _wrong_peers)
        self.run(pool, tmp_path, 1, _wrong_peers)

    @staticmethod
    def _survivors(outcomes: Sequence[Outcome], victim: int) -> list[tuple[int, Any]]:
        assert outcomes[victim].signal == signal.SIGKILL
        for outcome in outcomes:
            assert outcome.error is None, outcome.error
        return [(rank, outcome.value) for rank, outcome in enumerate(outcomes) if rank != victim]

    @staticmethod
    def _check_failure(failure: Failure, rank: int, error: str, *, group: str = "tp0", limit: float = TIMEOUT - 1) -> None:
        """Names the group and the rank, and did not come by the time-out where that is long."""
        kinds, message, seconds = failure
        assert error in kinds, failure
        assert f"group '{group}" in message, failure
        assert f"rank {rank}" in message, failure
        assert seconds < limit, failure


def _closed(comm: Any, device: torch.device) -> None:
    comm.barrier()
    comm.close()
    for operation in (comm.barrier, lambda: comm.all_reduce(torch.zeros(3, device=device))):
        kinds, message, _ = jobs.failure(operation)
        assert "closed" in message, (kinds, message)


def _wrong_peers(comm: Any, device: torch.device) -> None:
    for peer in (comm.rank, comm.world_size, -1):
        for operation in (comm.send, comm.recv):
            with pytest.raises(ValueError, match="no other rank"):
                operation(torch.zeros(3, device=device), peer)
    comm.barrier()
