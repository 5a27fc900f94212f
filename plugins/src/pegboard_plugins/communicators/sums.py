"""Sums over ranks that are bit-equal wherever they are computed: element by element, in rank order."""

from __future__ import annotations

from collections.abc import Callable

import torch

_LOW = (torch.float16, torch.bfloat16)
_SUMMABLE = (*_LOW, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64)
"""What gloo and NCCL can add up, too."""

Add = Callable[[list[torch.Tensor], torch.Tensor], object]
"""``(parts, into)``: two or more parts of one shape and dtype, and where their sum goes, which is none of them."""


def adder(dtype: torch.dtype, count: int) -> Add | None:
    """For ``count`` parts; None for a dtype that has no sum."""
    if dtype not in _SUMMABLE:
        return None
    if count == 2:
        return _add_two
    return _add_low if dtype in _LOW else _add


def check_summable(dtype: torch.dtype) -> None:
    if dtype not in _SUMMABLE:
        raise TypeError(f"all_reduce of {dtype}: there are sums of {', '.join(map(str, _SUMMABLE))}")


def _add_two(parts: list[torch.Tensor], into: torch.Tensor) -> None:
    """Of low precision too: one addition, rounded once."""
    torch.add(parts[0], parts[1], out=into)


def _add(parts: list[torch.Tensor], into: torch.Tensor) -> None:
    torch.add(parts[0], parts[1], out=into)
    for part in parts[2:]:
        into.add_(part)


def _add_low(parts: list[torch.Tensor], into: torch.Tensor) -> None:
    total = parts[0].to(torch.float32)
    for part in parts[1:]:
        total.add_(part)
    into.copy_(total)
