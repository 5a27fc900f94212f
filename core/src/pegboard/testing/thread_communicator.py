"""ThreadCommunicator: ranks that are threads of one process, so that tests of several ranks need start no process."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from pegboard.contracts.communicator import Communicator, CommunicatorTimeout, PeerLost

if TYPE_CHECKING:
    import torch

PATIENCE = 60.0


@dataclass
class _Group:
    barrier: threading.Barrier
    parts: list[torch.Tensor | None]
    messages: dict[tuple[int, int], SimpleQueue[torch.Tensor | None]] = field(default_factory=dict)


_groups: dict[tuple[str, str], _Group] = {}
_lock = threading.Lock()


class ThreadCommunicator(Communicator):
    """Sums go in rank order. ``sizes``: elements of every tensor that this rank has put into a collective, in order."""

    def __init__(self, *, rank: int, world_size: int, group: str, rendezvous: str = "", timeout: float = PATIENCE) -> None:
        self.rank, self.world_size = rank, world_size
        self.sizes: list[int] = []
        self._who, self._timeout = f"group {group!r}, rank {rank}", min(timeout, PATIENCE)
        self._key = (rendezvous, group)
        with _lock:
            found = _groups.get(self._key)
            if found is None or found.barrier.broken:
                found = _groups[self._key] = _Group(threading.Barrier(world_size), [None] * world_size)
                found.messages = {(a, b): SimpleQueue() for a in range(world_size) for b in range(world_size)}
        self._group = found
        self._wait()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = self._exchange(tensor)
        total = parts[0].clone() if tensor.element_size() > 2 or not tensor.is_floating_point() else parts[0].float()
        for part in parts[1:]:
            total += part
        self._wait()
        return tensor.copy_(total)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        import torch

        gathered = torch.cat(self._exchange(tensor if tensor.dim() else tensor.reshape(1)), dim)
        self._wait()
        return gathered

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._group.messages[self.rank, to].put(tensor.clone())

    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        try:
            message = self._group.messages[source, self.rank].get(timeout=self._timeout)
        except Empty:
            raise CommunicatorTimeout(f"{self._who}: recv from rank {source} has waited {self._timeout:g} s") from None
        if message is None:
            raise PeerLost(f"{self._who}: a rank has left the group")
        assert (message.shape, message.dtype) == (tensor.shape, tensor.dtype), f"{message.shape} came for {tensor.shape}"
        return tensor.copy_(message)

    def barrier(self) -> None:
        self._wait()

    def close(self) -> None:
        self._group.barrier.abort()
        for (source, _), messages in self._group.messages.items():
            if source == self.rank:
                messages.put(None)
        with _lock:
            if _groups.get(self._key) is self._group:
                del _groups[self._key]

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.sizes.append(tensor.numel())
        self._group.parts[self.rank] = tensor
        self._wait()
        parts = [part for part in self._group.parts if part is not None]
        assert len({(part.shape, part.dtype) for part in parts}) == 1, f"{self._who}: shapes or dtypes differ between ranks"
        return parts

    def _wait(self) -> None:
        try:
            self._group.barrier.wait(self._timeout)
        except threading.BrokenBarrierError:
            raise PeerLost(f"{self._who}: a rank has left the group, or has not come within {self._timeout:g} s") from None
