"""Graphs without a device that has them: a recording is a list of operations, and a replay does them again and compares. Needs
torch.

A captured graph repeats operations on the same addresses with the same numbers. Here the function itself runs again, and every
operation must be the recorded one: of the same name, on tensors of the same address, shape and strides where they were there
before, and with equal numbers. So what would silently be stale in a real graph is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pegboard.contracts.platform import DeviceGraph, DeviceGraphs, Platform

Entry = tuple[Any, ...]

WAITING: Final = (
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "argwhere",
    "masked_select",
    "unique",
    "lift_fresh",
    "equal",
)
"""Operations that wait for values, or bring some from the host, on a device: by how their names begin. What reads memory without
an operation (``numpy``, ``tolist``) is not noticed."""


class RecordedGraph(DeviceGraph):
    def __init__(self, function: Callable[[], None], entries: list[Entry]) -> None:
        self._function, self._entries = function, entries

    def replay(self) -> None:
        """Raises ``RuntimeError`` at the first operation that differs."""
        with _Comparing(self._entries) as seen:
            self._function()
        if len(seen.entries) != len(self._entries):
            raise RuntimeError(f"a replay of {len(self._entries)} operations ended after {len(seen.entries)}")


class RecordedGraphs(DeviceGraphs):
    """``num_bytes``: of all results of recorded operations, as if none found room in what others had left."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def capture(self, function: Callable[[], None]) -> RecordedGraph:
        function()
        with _Recording() as seen:
            function()
        self._num_bytes += seen.num_bytes
        return RecordedGraph(function, seen.entries)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation. Memory made while recording is known by its number, other memory by its address."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Entry] = []
        self.num_bytes = 0
        self._made: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        operation = name.split(".")[1] if "." in name else name
        if operation.startswith(WAITING) or (operation.startswith("index") and _has_mask(args)):
            raise RuntimeError(f"{name} cannot be captured: it waits for values, or brings them from the host")
        self.note((name, self._describe(args), self._describe(kwargs)))
        given = {_address(t) for t in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if _address(tensor) not in given:
                self._made[_address(tensor)] = len(self.entries)
                self.num_bytes += tensor.numel() * tensor.element_size()
        return result

    def note(self, entry: Entry) -> None:
        self.entries.append(entry)

    def _describe(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            address = _address(value)
            place = ("made", self._made[address]) if address in self._made else ("given", address)
            layout = () if value.is_mkldnn else (value.storage_offset(), value.stride())
            return (*place, tuple(value.shape), value.dtype, *layout)
        if isinstance(value, list | tuple):
            return tuple(self._describe(v) for v in value)
        if isinstance(value, dict):
            return tuple((key, self._describe(v)) for key, v in sorted(value.items()))
        return repr(value)


class _Comparing(_Recording):  # type: ignore[no-untyped-call]
    """Holds every operation against the recorded one."""

    def __init__(self, expected: list[Entry]) -> None:
        super().__init__()
        self._expected = expected

    def note(self, entry: Entry) -> None:
        place = len(self.entries)
        recorded = self._expected[place] if place < len(self._expected) else ("nothing",)
        if entry != recorded:
            raise RuntimeError(f"operation {place} of a replay is {entry}, and {recorded} was captured: a graph would be stale")
        super().note(entry)


def _address(tensor: torch.Tensor) -> int:
    """Of its memory; packed weights are known by the object, which stays."""
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in _tensors(v)] if isinstance(value, list | tuple) else []


def _has_mask(args: Any) -> bool:
    return any(t.dtype == torch.bool for t in _tensors(args[1:2]))


class RecordingPlatform(Platform):
    """The processor, as a device that can record. ``pools``: what it has made."""

    name = "recording"
    device_type = "cpu"

    def __init__(self) -> None:
        self.pools: list[RecordedGraphs] = []

    @classmethod
    def is_available(cls) -> bool:
        return True

    def device_count(self) -> int:
        return os.cpu_count() or 1

    def set_device(self, local_rank: int, num_threads: int | None) -> torch.device:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        return torch.device("cpu")

    def memory(self) -> tuple[int, int]:
        pages = {name: os.sysconf(name) for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES", "SC_PAGE_SIZE")}
        total = pages["SC_PHYS_PAGES"] * pages["SC_PAGE_SIZE"]
        return total - pages["SC_AVPHYS_PAGES"] * pages["SC_PAGE_SIZE"], total

    def preferred_dtype(self, stated: str | None) -> str:
        return stated or "float32"

    def synchronize(self) -> None: ...

    def make_graphs(self) -> RecordedGraphs:
        self.pools.append(RecordedGraphs())
        return self.pools[-1]
