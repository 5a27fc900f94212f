"""PrefixAllocator: released blocks stay findable by the key of their content until they are needed for something else."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.contracts.kv_allocator import NULL_BLOCK
from pegboard_plugins.kv.block_pool import BlockPool


class PrefixAllocator(BlockPool):
    """A block pool with prefix caching; the least recently released cached block is evicted first.

    A key chains over everything before its block (see ``prefix_hash``), so the first key that is missing ends a prefix.
    """

    caches_prefixes = True

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        found = []
        by_key = self._by_key
        for key in keys:
            block_id = by_key.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def publish(self, block_id: int, key: bytes) -> None:
        if block_id == NULL_BLOCK or key in self._by_key:
            return
        if self._refs[block_id] == 0:
            raise ValueError(f"block {block_id} is published but has no reference")
        old = self._keys[block_id]
        if old is not None:
            del self._by_key[old]
        self._keys[block_id] = key
        self._by_key[key] = block_id
