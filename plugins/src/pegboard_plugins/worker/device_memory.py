"""Memory that this process uses of its device; on a processor that is its resident memory. Bytes throughout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pegboard_plugins.worker import memory


def in_use(device: torch.device) -> int:
    return memory.resident() if device.type == "cpu" else torch.cuda.memory_allocated(device)


def peak(device: torch.device) -> int:
    """Of ``in_use`` since ``reset_peak``."""
    return memory.peak_resident() if device.type == "cpu" else torch.cuda.max_memory_allocated(device)


def reset_peak(device: torch.device) -> None:
    if device.type == "cpu":
        memory.reset_peak()
    else:
        torch.cuda.reset_peak_memory_stats(device)


def tidy(device: torch.device | None) -> None:
    """Give back what is free, so that memory in use means what it says. (Collecting garbage takes a third of a second.)"""
    memory.trim_heap()
    if device is not None and device.type == "cuda":
        torch.cuda.empty_cache()


def weight_bytes(model: Any) -> int:
    """Bytes of the tensors that ``model.parameters()`` gives (a mapping, or an iterable as of ``torch.nn.Module``), each once;
    0 for a model without that method."""
    if not callable(getattr(model, "parameters", None)):
        return 0
    found = model.parameters()
    tensors = found.values() if isinstance(found, Mapping) else found
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())
