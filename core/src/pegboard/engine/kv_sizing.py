"""How many KV-cache blocks there will be: from what every worker stores per block and what it has left."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.config import KVCacheSettings
from pegboard.engine.errors import EngineStartError
from pegboard.engine.kv_groups import block_bytes as bytes_of_block
from pegboard.engine.kv_groups import group_layers
from pegboard.wire import KVCacheConfig, KVCacheSpec, MemoryReport
from pegboard.wire.kv_cache import UNLIMITED

_NULL_BLOCKS = 1
"""Block 0 never holds data (``pegboard.contracts.kv_allocator.NULL_BLOCK``)."""


def kv_cache_config(
    settings: KVCacheSettings,
    specs: Sequence[dict[str, KVCacheSpec]],
    reports: Sequence[MemoryReport],
    max_model_len: int = UNLIMITED,
) -> KVCacheConfig:
    """Agree on one ``KVCacheConfig`` for all ranks. ``specs`` and ``reports`` are in rank order. A sliding window counts if it
    is shorter than ``max_model_len``.

    ``settings.num_blocks`` is taken as it is; otherwise the rank with the least room decides.

    Raises:
        EngineStartError: not even one block fits, or the layers cannot share a cache (see ``group_layers``).
    """
    groups = group_layers(specs, max_model_len)
    block_bytes = [bytes_of_block(groups, rank) for rank in specs]
    if settings.num_blocks is not None:
        num_blocks = settings.num_blocks + _NULL_BLOCKS
    else:
        per_rank = [r.available // b for r, b in zip(reports, block_bytes, strict=True) if b]
        num_blocks = min(per_rank, default=0)
        if num_blocks <= _NULL_BLOCKS:
            raise EngineStartError(_no_room(block_bytes, reports))
    host_blocks = min((settings.swap_space // b for b in block_bytes if b), default=0)
    return KVCacheConfig(num_blocks=num_blocks, groups=groups, num_host_blocks=host_blocks)


def _no_room(block_bytes: Sequence[int], reports: Sequence[MemoryReport]) -> str:
    rank, report = min(
        ((i, r) for i, r in enumerate(reports) if block_bytes[i]), key=lambda r: r[1].available // block_bytes[r[0]]
    )
    return (
        f"no room for the KV cache: rank {rank} has {report.available} bytes for it ({report.reason}), "
        f"and two blocks of {block_bytes[rank]} bytes are the least. Raise kv_cache.memory (or kv_cache.memory_fraction), "
        f"or lower kv_cache.block_size, scheduler.max_num_batched_tokens or scheduler.max_num_seqs"
    )
