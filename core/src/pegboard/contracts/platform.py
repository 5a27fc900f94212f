"""Platform: a family of devices."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

API: Final = 1


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
