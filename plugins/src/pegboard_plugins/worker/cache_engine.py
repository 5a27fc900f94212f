"""CacheEngine: the KV-cache tensors of one worker, on the device and, for swapped-out blocks, on the host."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence

import torch

from pegboard.contracts.attention import AttentionBackend, AttentionLayer
from pegboard.wire import KVCacheConfig, SchedulerOutput

Pairs = Sequence[tuple[int, int]]


class CacheEngine:
    """``device_caches`` and ``host_caches`` hold one tensor per attention layer; the first dimension is the block.

    Moves of one list happen at once: every source is read before any destination is written.
    """

    def __init__(
        self,
        kv_config: KVCacheConfig,
        layers: Sequence[AttentionLayer],
        backend: type[AttentionBackend],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._backend = backend
        self._kv_config, self._layers, self._dtype, self._device = kv_config, layers, dtype, device
        self.device_caches: dict[str, torch.Tensor] = {}
        self.host_caches: dict[str, torch.Tensor] = {}
        self.allocate()

    def allocate(self) -> None:
        """Make the tensors, zeroed."""
        self.device_caches = self._pool(self._kv_config.num_blocks, self._device)
        if self._kv_config.num_host_blocks:
            self.host_caches = self._pool(self._kv_config.num_host_blocks, torch.device("cpu"))

    def release(self) -> None:
        """Give all of it back: what the blocks held is gone."""
        self.device_caches, self.host_caches = {}, {}

    def apply(self, plan: SchedulerOutput) -> None:
        """The plan's moves, in their order."""
        if plan.swap_out:
            self._move(self.device_caches, self.host_caches, plan.swap_out)
        if plan.swap_in:
            self._move(self.host_caches, self.device_caches, plan.swap_in)
        if plan.block_copies:
            self._move(self.device_caches, self.device_caches, plan.block_copies)

    def clear_null_block(self) -> None:
        """Padding may be read from block 0: whatever warm-up left there must not be able to spread (0 * NaN is NaN)."""
        for cache in self.device_caches.values():
            cache[0].zero_()

    def _pool(self, num_blocks: int, device: torch.device) -> dict[str, torch.Tensor]:
        block_size = self._kv_config.block_size
        shapes = {
            layer.name: self._backend.kv_cache_shape(num_blocks, block_size, layer.num_kv_heads, layer.head_size)
            for layer in self._layers
        }
        pinned = device != self._device
        return {name: _zeros(shape, self._dtype, device, pinned) for name, shape in shapes.items()}

    def _move(self, source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor], pairs: Pairs) -> None:
        ids = torch.tensor(pairs, dtype=torch.int64)
        for name, blocks in source.items():
            self._backend.move_blocks(blocks, target[name], ids)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pinned: bool) -> torch.Tensor:
    """Zeros; in the processor's memory they are committed page by page, when a block is first written."""
    if device.type != "cpu" or pinned:
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)
    # straight from the system: an allocator may hand out memory that was used before, and would have to clear all of it
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
