"""Memory that attention uses while it computes, kept from step to step so that no layer allocates."""

from __future__ import annotations

import math

import torch


class Workspace:
    """Named flat buffers that only grow. A view stays valid (it keeps its memory) when its buffer is replaced by a larger one.

    Users of one name overwrite each other: a buffer's content is good until the next user's first operation.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def view(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """``shape`` at the start of buffer ``name``; grows the buffer by half more than needed when it is too small."""
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            # A tensor made in inference mode could not be written outside of it; a normal one can be written in both.
            with torch.inference_mode(False):
                buffer = torch.empty(size if buffer is None else size + size // 2, dtype=dtype, device=self._device)
            self._buffers[name, dtype] = buffer
        return buffer[:size].view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes held by all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())
