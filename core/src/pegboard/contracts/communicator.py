"""Communicator: collectives among the ranks of one group."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

API: Final = 1


class CommunicatorError(RuntimeError):
    """An operation that could not be completed. The message names the group and the rank.

    The communicator is of no further use: every later operation raises the same error; only ``close`` remains.
    """


class PeerLost(CommunicatorError):
    """A rank of the group has ended, failed or left. The message names it where that is known."""


class CommunicatorTimeout(CommunicatorError, TimeoutError):
    """A rank of the group did not come within the group's time-out."""


class Communicator(abc.ABC):
    """One rank's end of a group. Constructed, by name, with those that it takes of

    - ``rank`` and ``world_size``: within the group;
    - ``group``: the group's name, unique among the groups that meet at ``rendezvous``;
    - ``rendezvous``: where the ranks meet. A folder that all of them see, made by whoever starts the ranks, anew for each start
      of their processes; or ``tcp://host:port`` of a ``torch.distributed.TCPStore`` that is already being served;
    - ``device``: the ``torch.device`` of the tensors;
    - ``timeout``: seconds that the constructor and each operation may wait for other ranks.

    All ranks construct at the same time: the constructor returns when every rank has come, or raises ``CommunicatorError``.
    A group may be made again under its name after ``close``. Needs no process group of its caller and makes no global one, so
    that a process may be in many groups.

    Invariants: every rank calls the same collectives (``all_reduce``, ``all_gather``, ``barrier``) in the same order with equal
    shapes and dtypes; results are bit-equal on all ranks; a lost peer is an error within the group's time-out, not a hang. In a
    group of one rank collectives cost nothing and return their argument. Used from one thread at a time, without gradients.
    """

    rank: int
    world_size: int
    capturable: bool = False
    """Whether ``all_reduce`` and ``all_gather`` only put work on the device, so that a graph can be captured of them."""

    @abc.abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, of floats and integers (which wrap around). May work in place: ``tensor`` must not be used again."""

    @abc.abstractmethod
    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' tensors along ``dim``, in rank order. A tensor without dimensions counts as one of shape [1]."""

    @abc.abstractmethod
    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Returns when ``tensor`` may be changed, which may be before or after the other rank has called ``recv``: two ranks that
        both send first may wait for one another."""

    @abc.abstractmethod
    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Fill ``tensor``, whose shape and dtype are those that ``source`` sends, and return it. What one rank sends comes in the
        order in which it was sent."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Returns when every rank has called it."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the group; other ranks that wait for this one get ``PeerLost``. Idempotent; leaves neither files nor memory."""
