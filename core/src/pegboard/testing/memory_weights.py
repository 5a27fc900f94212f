"""Weight handles over tensors in memory, which count how often they are read."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class MemoryHandle:
    """One tensor. ``reads`` counts ``read`` and ``read_slice`` together, ``numbers`` what they gave."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.tensor = name, tensor
        self.reads = self.numbers = 0
        self.shape: tuple[int, ...] = tuple(tensor.shape)
        self.dtype = str(tensor.dtype).removeprefix("torch.")

    def read(self) -> torch.Tensor:
        return self._read(self.tensor)

    def read_slice(self, dim: int, start: int, length: int) -> torch.Tensor:
        return self._read(self.tensor.narrow(dim, start, length))

    def _read(self, part: torch.Tensor) -> torch.Tensor:
        self.reads += 1
        self.numbers += part.numel()
        return part


def memory_handles(tensors: Mapping[str, torch.Tensor]) -> dict[str, MemoryHandle]:
    return {name: MemoryHandle(name, tensor) for name, tensor in tensors.items()}
