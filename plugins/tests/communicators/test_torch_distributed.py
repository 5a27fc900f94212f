"""What TorchDistributedCommunicator does beyond the contract."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from pegboard_plugins.communicators.torch_distributed import TorchDistributedCommunicator


def test_refuses_devices_without_a_back_end(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing for meta"):
        TorchDistributedCommunicator(
            rank=0, world_size=2, group="tp0", rendezvous=str(tmp_path), device=torch.device("meta"), timeout=1.0
        )


def test_makes_no_global_group(tmp_path: Path) -> None:
    """Two ranks in one process, as two engines may have."""

    def rank(number: int) -> list[float]:
        comm = TorchDistributedCommunicator(
            rank=number, world_size=2, group="tp0", rendezvous=str(tmp_path), device=torch.device("cpu"), timeout=30.0
        )
        assert list(tmp_path.iterdir()) == []
        try:
            return comm.all_reduce(torch.full((3,), number + 1.0)).tolist()
        finally:
            comm.close()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(rank, range(2))) == [[3, 3, 3]] * 2
    assert not torch.distributed.is_initialized()
