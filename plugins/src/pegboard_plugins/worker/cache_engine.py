"""CacheEngine: the KV-cache tensors of one worker, on the device and, for swapped-out blocks, on the host."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence

import torch

from pegboard.contracts.attention import AttentionBackend, AttentionLayer
from pegboard.wire import KVCacheConfig, SchedulerOutput

Pairs = Sequence[tuple[int, int]]
Caches = dict[str, torch.Tensor]


class CacheEngine:
    """``device_caches`` and ``host_caches`` give each attention layer its tensor, whose first dimension is the block.

    A block belongs to one group of layers at a time, so groups share memory: the first layers of all groups lie in one buffer,
    the second ones in the next. Layers of one buffer may see a block in shapes of their own, but it has the same bytes for each.
    Moves of one list happen at once: every source is read before any destination is written.
    """

    def __init__(
        self,
        kv_config: KVCacheConfig,
        layers: Sequence[AttentionLayer],
        backends: Mapping[str, type[AttentionBackend]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``layers`` are those of this rank, ``backends`` the class for each. Raises ``ValueError`` for a layer that is in no
        group, and where layers that share a buffer take different bytes."""
        self._kv_config, self._backends, self._dtype, self._device = kv_config, backends, dtype, device
        self._buffers = _buffers(kv_config, {layer.name: layer for layer in layers})
        self.device_caches: Caches = {}
        self.host_caches: Caches = {}
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

    def _pool(self, num_blocks: int, device: torch.device) -> Caches:
        pinned = device != self._device
        caches = {}
        for layers in self._buffers:
            shapes = {layer.name: self._shape(layer, num_blocks) for layer in layers}
            sizes = {name: math.prod(shape) for name, shape in shapes.items()}
            if len(set(sizes.values())) > 1:
                raise ValueError(f"layers of one block size take different numbers of cache entries: {sizes}")
            memory = _zeros(next(iter(sizes.values())), self._dtype, device, pinned)
            caches.update({name: memory.view(shape) for name, shape in shapes.items()})
        return caches

    def _shape(self, layer: AttentionLayer, num_blocks: int) -> tuple[int, ...]:
        backend = self._backends[layer.name]
        return backend.kv_cache_shape(num_blocks, self._kv_config.block_size, layer.num_kv_heads, layer.head_size)

    def _move(self, source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor], pairs: Pairs) -> None:
        """Whole blocks, whatever group they belong to: once per buffer, as its first layer sees it."""
        ids = torch.tensor(pairs, dtype=torch.int64)
        for layers in self._buffers:
            name = layers[0].name
            self._backends[name].move_blocks(source[name], target[name], ids)


def _buffers(kv_config: KVCacheConfig, layers: Mapping[str, AttentionLayer]) -> list[list[AttentionLayer]]:
    """The layers that share each buffer: at most one of every group."""
    own = [[layers[name] for name in group.layers if name in layers] for group in kv_config.groups]
    homeless = layers.keys() - {layer.name for group in own for layer in group}
    if homeless:
        raise ValueError(f"the KV cache has no group for the layers {sorted(homeless)}")
    return [[group[i] for group in own if i < len(group)] for i in range(max(len(group) for group in own))]


def _zeros(count: int, dtype: torch.dtype, device: torch.device, pinned: bool) -> torch.Tensor:
    """[count] zeros; in the processor's memory they are committed page by page, when a block is first written."""
    if device.type != "cpu" or pinned:
        return torch.zeros(count, dtype=dtype, device=device, pin_memory=pinned)
    # straight from the system: an allocator may hand out memory that was used before, and would have to clear all of it
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype)
