"""Torch tensors in messages: their memory travels as an out-of-band buffer. Torch is touched only where it is loaded already.

Torch's own reduction writes the storage through ``torch.save`` into the pickle. Dense CPU tensors without gradient need only
dtype, shape and bytes; all others keep torch's way.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any


def reducers() -> dict[type, Any]:
    """Entries for a pickler's ``dispatch_table``."""
    tensor = getattr(sys.modules["torch"], "Tensor", None)  # None while torch is being imported
    return {} if tensor is None else {tensor: _reduce}


def _reduce(tensor: Any) -> Any:
    import torch

    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.requires_grad
    if not plain or tensor.is_quantized or tensor.is_neg() or tensor.is_conj() or tensor.__dict__:
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    return _rebuild, (pickle.PickleBuffer(raw.numpy()), tensor.dtype, tuple(tensor.shape))


def _rebuild(buffer: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    if not len(buffer):
        return torch.empty(shape, dtype=dtype)
    if memoryview(buffer).readonly:  # came in the pickle, as it was small
        buffer = bytearray(buffer)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).reshape(shape)
