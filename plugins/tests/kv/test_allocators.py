"""The two standard allocators keep the allocator's contract."""

from __future__ import annotations

from pegboard.testing.conformance.kv_allocator import KVAllocatorConformance
from pegboard_plugins.kv.paged import PagedAllocator
from pegboard_plugins.kv.prefix import PrefixAllocator


class TestPagedAllocator(KVAllocatorConformance):
    def make(self, num_blocks: int, block_size: int) -> PagedAllocator:
        return PagedAllocator(num_blocks, block_size)


class TestPrefixAllocator(KVAllocatorConformance):
    def make(self, num_blocks: int, block_size: int) -> PrefixAllocator:
        return PrefixAllocator(num_blocks, block_size)

    def test_of_one_request_the_start_of_the_prefix_survives_longest(self) -> None:
        pool = self.make(5, 16)
        blocks = pool.take(4) or []
        for place, block in enumerate(blocks):
            pool.publish(block, bytes([place]))
        pool.release(blocks[::-1])
        pool.take(2)
        assert pool.lookup([bytes([place]) for place in range(4)]) == blocks[:2]

    def test_a_block_used_again_is_evicted_later(self) -> None:
        pool = self.make(3, 16)
        old, new = pool.take(2) or []
        pool.publish(old, b"old")
        pool.publish(new, b"new")
        pool.release([old])
        pool.release([new])
        pool.reference([old])
        pool.release([old])
        assert pool.take(1) == [new]
