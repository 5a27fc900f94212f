"""Keys and values as a cache of another type holds them, and back."""

from __future__ import annotations

import torch

from pegboard.contracts.attention import FLOAT8_LIMIT, INT8_LIMIT

STORED_DTYPES = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
"""Types that are only stored, not computed in."""


def to_stored(values: torch.Tensor, scale: float | torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """``values`` [T, kv heads, head size] divided by ``scale`` (a number, or one per head) in float32, rounded and cut off."""
    if scale is None and values.dtype == dtype:
        return values
    numbers = values.float()
    if scale is not None:
        numbers = numbers / (scale[:, None] if isinstance(scale, torch.Tensor) else scale)
    if dtype == torch.int8:
        numbers = numbers.round().clamp_(-INT8_LIMIT, INT8_LIMIT)
    elif dtype == torch.float8_e4m3fn:
        numbers = numbers.clamp(-FLOAT8_LIMIT, FLOAT8_LIMIT)
    return numbers.to(dtype)


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits in a type that torch can index: on a processor it indexes no 8-bit floating point numbers."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def widen(stored: torch.Tensor, wide: torch.Tensor) -> None:
    """``wide``, of a type in which attention computes, gets the numbers of ``stored``, exactly where it can hold them."""
    if stored.dtype == torch.float8_e4m3fn and wide.device.type == "cpu" and wide.dtype in _MOVED_UP:
        _widen_bits(stored, wide)
    else:
        wide.copy_(stored)


_MOVED_UP = {torch.bfloat16: (torch.int16, 4, 0x87F0 - (1 << 16)), torch.float32: (torch.int32, 20, 0x87F00000 - (1 << 32))}
"""Whole numbers as wide as the type; how far a float8's exponent and mantissa are moved up to be the type's; the bits that count
then, the sign's among them."""
_EXPONENTS_APART = 127 - 7
"""Offset of the exponent in bfloat16 and float32, less that in float8_e4m3fn."""


def _widen_bits(stored: torch.Tensor, wide: torch.Tensor) -> None:
    """On a processor torch converts 8-bit floating point numbers one by one; moving their bits is 50 times as fast.

    Bits taken for a wider number with the same mantissa are the number times a power of two, also for the smallest ones, whose
    exponent is 0. Only not-a-number becomes a number, 480.
    """
    whole, distance, kept = _MOVED_UP[wide.dtype]
    bits = wide.view(whole)
    bits.copy_(stored.view(torch.int8))  # the sign is spread upwards
    bits.bitwise_left_shift_(distance).bitwise_and_(kept)
    wide.mul_(2.0**_EXPONENTS_APART)
