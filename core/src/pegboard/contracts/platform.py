"""Platform: a family of devices."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

API: Final = 1


class DeviceGraph(abc.ABC):
    """A recording of what a function has put on the device."""

    @abc.abstractmethod
    def replay(self) -> None:
        """Do it again, on the current stream, with the same addresses and the same numbers that are no tensors."""


class DeviceGraphs(abc.ABC):
    """A device's way to record operations and to launch all of them at once. What is recorded shares one pool of memory, so
    recordings of one object must not run at the same time, and what they leave there lasts until another one runs."""

    @abc.abstractmethod
    def capture(self, function: Callable[[], None]) -> DeviceGraph:
        """Record ``function``, which reads and writes tensors that stay where they are. It is first called without recording, so
        that it can compile and initialise what it needs. Raises ``RuntimeError`` for what cannot be recorded, such as waiting
        for the device."""

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Memory that recordings have taken so far."""


class Platform(abc.ABC):
    """What the worker must know of a device family. Invariant: ``is_available`` neither raises nor initialises a device."""

    name: str
    device_type: str

    @classmethod
    @abc.abstractmethod
    def is_available(cls) -> bool: ...

    @abc.abstractmethod
    def device_count(self) -> int: ...

    @abc.abstractmethod
    def set_device(self, local_rank: int, num_threads: int | None) -> torch.device:
        """Bind this process to a device and set its thread count."""

    @abc.abstractmethod
    def memory(self) -> tuple[int, int]:
        """(used by this process, total) in bytes, of the device."""

    @abc.abstractmethod
    def preferred_dtype(self, stated: str | None) -> str:
        """Compute dtype for a checkpoint that states ``stated``; a replacement is logged by the caller."""

    @abc.abstractmethod
    def synchronize(self) -> None: ...

    def make_graphs(self) -> DeviceGraphs | None:
        """A new, empty pool of recordings; None where the device cannot record."""
        return None
