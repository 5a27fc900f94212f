"""Both communicators keep the contract."""

from __future__ import annotations

import pytest

from pegboard.testing.conformance.communicator import CommunicatorConformance, CommunicatorResults


@pytest.mark.slow
class TestTorchDistributed(CommunicatorConformance):
    target = "pegboard_plugins.communicators.torch_distributed:TorchDistributedCommunicator"


@pytest.mark.slow
class TestSharedMemory(CommunicatorConformance):
    target = "pegboard_plugins.communicators.shared_memory:SharedMemoryCommunicator"


@pytest.mark.slow
class TestSharedMemoryInSmallPieces(CommunicatorResults):
    target = "pegboard_plugins.communicators.shared_memory:SharedMemoryCommunicator"
    options = {"slot_bytes": 2048}
    large = (110, 120)
