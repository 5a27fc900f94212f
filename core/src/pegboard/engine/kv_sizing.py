"""How many KV-cache blocks there will be: from what every worker stores per block and what it has left."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.config import KVCacheSettings
from pegboard.engine.errors import EngineStartError
from pegboard.wire import KVCacheConfig, KVCacheGroup, KVCacheSpec, MemoryReport

_NULL_BLOCKS = 1
"""Block 0 never holds data (``pegboard.contracts.kv_allocator.NULL_BLOCK``)."""


def kv_cache_config(
    settings: KVCacheSettings, specs: Sequence[dict[str, KVCacheSpec]], reports: Sequence[MemoryReport]
) -> KVCacheConfig:
    """Agree on one ``KVCacheConfig`` for all ranks. ``specs`` and ``reports`` are in rank order.

    ``settings.num_blocks`` is taken as it is; otherwise the rank with the least room decides.

    Raises:
        EngineStartError: not even one block fits, ranks disagree on a layer, or no layer has a KV cache.
    """
    groups = _groups(specs)
    block_bytes = [sum(s.block_bytes for s in rank.values()) for rank in specs]
    if settings.num_blocks is not None:
        num_blocks = settings.num_blocks + _NULL_BLOCKS
    else:
        per_rank = [r.available // b for r, b in zip(reports, block_bytes, strict=True) if b]
        num_blocks = min(per_rank, default=0)
        if num_blocks <= _NULL_BLOCKS:
            raise EngineStartError(_no_room(block_bytes, reports))
    host_blocks = min((settings.swap_space // b for b in block_bytes if b), default=0)
    return KVCacheConfig(num_blocks=num_blocks, groups=groups, num_host_blocks=host_blocks)


def _groups(specs: Sequence[dict[str, KVCacheSpec]]) -> list[KVCacheGroup]:
    """Layers of all ranks, grouped by what they store, in the order of their first layer."""
    layers: dict[str, KVCacheSpec] = {}
    for rank, rank_specs in enumerate(specs):
        for name, spec in rank_specs.items():
            if layers.setdefault(name, spec) != spec:
                raise EngineStartError(f"rank {rank} stores {spec} for layer {name!r}, another rank {layers[name]}")
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name, spec in layers.items():
        by_spec.setdefault(spec, []).append(name)
    if not by_spec:
        raise EngineStartError("no worker has an attention layer, so there is no KV cache to manage")
    return [KVCacheGroup(layers=names, spec=spec) for spec, names in by_spec.items()]


def _no_room(block_bytes: Sequence[int], reports: Sequence[MemoryReport]) -> str:
    rank, report = min(
        ((i, r) for i, r in enumerate(reports) if block_bytes[i]), key=lambda r: r[1].available // block_bytes[r[0]]
    )
    return (
        f"no room for the KV cache: rank {rank} has {report.available} bytes for it ({report.reason}), "
        f"and two blocks of {block_bytes[rank]} bytes are the least. Raise kv_cache.memory (or kv_cache.memory_fraction), "
        f"or lower kv_cache.block_size, scheduler.max_num_batched_tokens or scheduler.max_num_seqs"
    )
