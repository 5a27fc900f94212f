"""BlockPool: reference counts, keys and the free queue of a fixed set of KV blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pegboard.contracts.kv_allocator import NULL_BLOCK, KVAllocator
from pegboard_plugins.kv.free_queue import FreeQueue


class BlockPool(KVAllocator):
    """Arrays over block ids: ``_refs[b]`` users of block b, ``_keys[b]`` the key under which it is found, or None.

    Free blocks without a key stand at the front of the queue and are handed out first; free blocks with one stand behind
    them, least recently released first, and lose their key when they are taken.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks={num_blocks} leaves no usable KV block (block 0 is the null block); it must be at least 2: "
                "raise kv_cache.memory or kv_cache.num_blocks"
            )
        if block_size < 1:
            raise ValueError(f"block_size={block_size} must be at least 1")
        self.block_size = block_size
        self._num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._free = FreeQueue(num_blocks, range(1, num_blocks))

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def ref_count(self, block_id: int) -> int:
        return self._refs[block_id]

    def take(self, n: int) -> list[int] | None:
        if n > len(self._free):
            return None
        taken = self._free.take(n)
        refs, keys = self._refs, self._keys
        for block_id in taken:
            refs[block_id] = 1
            key = keys[block_id]
            if key is not None:
                del self._by_key[key]
                keys[block_id] = None
        return taken

    def reference(self, block_ids: Iterable[int]) -> None:
        refs = self._refs
        for block_id in block_ids:
            if block_id != NULL_BLOCK:
                if refs[block_id] == 0:
                    self._free.remove(block_id)
                refs[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        refs, keys = self._refs, self._keys
        cached: list[int] = []
        uncached: list[int] = []
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            if refs[block_id] == 0:
                self._restore(cached + uncached)
                raise ValueError(f"block {block_id} is released but has no reference")
            refs[block_id] -= 1
            if refs[block_id] == 0:
                (uncached if keys[block_id] is None else cached).append(block_id)
        self._restore(cached + uncached)

    def _restore(self, block_ids: Sequence[int]) -> None:
        """Queue blocks that have just lost their last reference."""
        keys = self._keys
        self._free.extend_front([b for b in block_ids if keys[b] is None])
        self._free.extend(b for b in block_ids if keys[b] is not None)

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        return []

    def publish(self, block_id: int, key: bytes) -> None:
        pass

    def reset(self) -> bool:
        if len(self._free) != self._num_blocks - 1:
            return False
        self._by_key.clear()
        self._keys = [None] * self._num_blocks
        return True

    def check_integrity(self) -> None:
        self._free.check_integrity()
        referenced = 0
        for block_id in range(self._num_blocks):
            refs, key = self._refs[block_id], self._keys[block_id]
            referenced += refs > 0
            assert refs >= 0, f"block {block_id} has {refs} references"
            assert (block_id in self._free) == (refs == 0 and block_id != NULL_BLOCK), f"block {block_id}: free or held?"
            assert key is None or self._by_key.get(key) == block_id, f"block {block_id} is not found by its key"
        assert self._refs[NULL_BLOCK] == 0, "the null block has references"
        assert self._keys[NULL_BLOCK] is None, "the null block has a key"
        assert referenced + len(self._free) == self._num_blocks - 1, "blocks lost: held + free + null is not the total"
        assert len(self._by_key) == sum(key is not None for key in self._keys), "a key points to a block that lacks it"
        uncached = [self._keys[b] is None for b in self._free]
        assert uncached == sorted(uncached, reverse=True), "an uncached free block stands behind a cached one"
