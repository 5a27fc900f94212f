"""What a rank is about to do, in one word, so that ranks that do different things notice."""

from __future__ import annotations

import torch

ALL_REDUCE, SHARES, ALL_GATHER, BARRIER, MESSAGE = (code << 48 for code in range(1, 6))
_OPERATIONS = {ALL_REDUCE: "all_reduce", SHARES: "all_reduce", ALL_GATHER: "all_gather", BARRIER: "barrier", MESSAGE: "send"}

_DTYPES = tuple(
    getattr(torch, name)
    for name in (
        *("float32", "bfloat16", "float16", "float64", "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
        *("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    )
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES, 1)}


def contents(tensor: torch.Tensor) -> int:
    """Dtype and number of elements. Raises ``TypeError`` for a dtype that cannot be shared."""
    code = _CODES.get(tensor.dtype)
    if code is None:
        raise TypeError(f"a tensor of {tensor.dtype} cannot be sent; known are {', '.join(map(str, _DTYPES))}")
    return code << 40 | tensor.numel()


def along(dim: int) -> int:
    """The dimension of an ``all_gather``, for its signature."""
    return (dim & 0xFF) << 52


def describe(signature: int) -> str:
    operation, code, count = signature & (15 << 48), signature >> 40 & 0xFF, signature & ((1 << 40) - 1)
    text = _OPERATIONS.get(operation, "nothing known")
    if operation == ALL_GATHER:
        text += f" along dimension {signature >> 52}"
    return f"{text} of {count} x {_DTYPES[code - 1]}" if code else text
