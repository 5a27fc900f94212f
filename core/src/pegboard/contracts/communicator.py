"""Communicator: collectives among the ranks of one group."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

API: Final = 1


class Communicator(abc.ABC):
    """Invariants: every rank calls the same operations in the same order with equal shapes and dtypes; results are bit-equal
    on all ranks; a lost peer is an error within the group's time-out, not a hang."""

    rank: int
    world_size: int

    @abc.abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks. May work in place."""

    @abc.abstractmethod
    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' tensors along ``dim``, in rank order."""

    @abc.abstractmethod
    def send(self, tensor: torch.Tensor, to: int) -> None: ...

    @abc.abstractmethod
    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Fill ``tensor``."""

    @abc.abstractmethod
    def barrier(self) -> None: ...

    @abc.abstractmethod
    def close(self) -> None: ...
