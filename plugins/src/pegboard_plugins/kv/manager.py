"""StandardKVCacheManager: the block tables of all requests, over any KVAllocator."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.contracts.kv_allocator import KVAllocator
from pegboard.contracts.kv_cache_manager import BlockIds, Fork, KVCacheManager, PrefixHit
from pegboard_plugins.kv.block_pool import BlockPool
from pegboard_plugins.kv.prefix_hash import extend_keys, group_keys, root_key


class _Table:
    """What one request holds. ``blocks``: one list per group, all of one length. ``keys``: of its full blocks, as far as they
    were needed. ``num_published``: leading blocks already offered to the allocator. ``host``: set while swapped out."""

    __slots__ = ("blocks", "host", "keys", "num_published", "root")

    def __init__(self, num_groups: int) -> None:
        self.blocks: BlockIds = [[] for _ in range(num_groups)]
        self.host: BlockIds | None = None
        self.keys: list[bytes] = []
        self.root = b""
        self.num_published = 0


class StandardKVCacheManager(KVCacheManager):
    """Block tables over ``allocator``; ``num_groups`` KV-cache groups take their blocks from the same pool.

    ``num_host_blocks`` bounds what ``swap_out`` may move to the host. Nothing here knows of steps: a caller with plans in
    flight calls ``free`` when no plan can write the blocks any more.
    """

    def __init__(self, allocator: KVAllocator, block_size: int, num_groups: int = 1, num_host_blocks: int = 0) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.num_groups = num_groups
        self.caches_prefixes = allocator.caches_prefixes
        self._tables: dict[str, _Table] = {}
        self._host = BlockPool(num_host_blocks + 1, block_size) if num_host_blocks else None

    @property
    def num_usable_blocks(self) -> int:
        return self.allocator.num_blocks - 1

    @property
    def max_tokens_per_request(self) -> int:
        """Tokens that fit when one request holds every block."""
        return self.num_usable_blocks // self.num_groups * self.block_size

    # -- prefix cache ------------------------------------------------------------------------------------------------

    def get_computed_blocks(self, request_id: str, token_ids: Sequence[int], salt: str | None = None) -> PrefixHit:
        num_full = (len(token_ids) - 1) // self.block_size  # the last token is never a hit
        if not self.caches_prefixes or num_full <= 0:
            return PrefixHit()
        keys = self._keys(self._table(request_id), token_ids, num_full, salt)[:num_full]
        hits = [self.allocator.lookup(group_keys(keys, group)) for group in range(self.num_groups)]
        length = min(len(blocks) for blocks in hits)
        return PrefixHit([blocks[:length] for blocks in hits], length * self.block_size) if length else PrefixHit()

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed: int, salt: str | None = None) -> None:
        table = self._tables.get(request_id)
        num_full = min(num_computed, len(token_ids)) // self.block_size
        if not self.caches_prefixes or table is None or num_full <= table.num_published:
            return
        keys = self._keys(table, token_ids, num_full, salt)[table.num_published : num_full]
        for group, blocks in enumerate(table.blocks):
            for block_id, key in zip(blocks[table.num_published : num_full], group_keys(keys, group), strict=True):
                self.allocator.publish(block_id, key)
        table.num_published = num_full

    def _keys(self, table: _Table, token_ids: Sequence[int], num_full: int, salt: str | None) -> list[bytes]:
        """Keys of at least ``num_full`` blocks; each is computed once per request."""
        if len(table.keys) < num_full:
            table.root = table.root or root_key(self.block_size, salt)
            extend_keys(table.keys, table.root, token_ids, num_full, self.block_size)
        return table.keys

    # -- block tables ------------------------------------------------------------------------------------------------

    def allocate_slots(
        self, request_id: str, num_tokens: int, hit: PrefixHit | None = None, reserve_blocks: int = 0
    ) -> BlockIds | None:
        table = self._table(request_id)
        assert table.host is None, f"request {request_id!r} is swapped out"
        adopted: BlockIds = hit.block_ids if hit is not None and hit.num_tokens else [[] for _ in table.blocks]
        assert not (adopted[0] and table.blocks[0]), "a prefix hit is adopted on the first allocation only"
        each = -(-num_tokens // self.block_size) - len(table.blocks[0]) - len(adopted[0])
        missing = max(0, each) * self.num_groups
        allocator = self.allocator
        if adopted[0]:
            missing_or_revived = missing + sum(allocator.ref_count(b) == 0 for blocks in adopted for b in blocks)
        else:
            missing_or_revived = missing
        if missing_or_revived + (reserve_blocks if missing_or_revived else 0) > allocator.num_free:
            return None
        for blocks in adopted:
            allocator.reference(blocks)  # before taking: a hit must not be evicted for its own request
        fresh = allocator.take(missing) if missing else []
        assert fresh is not None, "the allocator has fewer free blocks than it says"
        added = [ids + fresh[group :: self.num_groups] for group, ids in enumerate(adopted)]
        for blocks, ids in zip(table.blocks, added, strict=True):
            blocks += ids
        if adopted[0]:
            table.num_published = len(adopted[0])
        return added

    def free(self, request_id: str) -> None:
        table = self._tables.pop(request_id, None)
        if table is None:
            return
        for blocks in table.blocks:
            self.allocator.release(blocks[::-1])  # tail first: the start of a prefix is worth more
        if table.host is not None and self._host is not None:
            for blocks in table.host:
                self._host.release(blocks)

    def block_ids(self, request_id: str) -> BlockIds:
        table = self._tables.get(request_id)
        return [list(blocks) for blocks in table.blocks] if table else [[] for _ in range(self.num_groups)]

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> Fork | None:
        parent = self._tables[parent_id]
        assert not self.num_blocks_of(child_id), f"request {child_id!r} has blocks already"
        num_full, partial = divmod(num_tokens, self.block_size)
        assert num_full + bool(partial) <= len(parent.blocks[0]), "the parent holds fewer tokens than its child is to get"
        fresh = self.allocator.take(self.num_groups) if partial else [0] * self.num_groups
        if fresh is None:
            return None
        child = self._table(child_id)
        copies = []
        for group, blocks in enumerate(parent.blocks):
            shared = blocks[:num_full]
            self.allocator.reference(shared)
            child.blocks[group] = shared + ([fresh[group]] if partial else [])
            if partial:
                copies.append((blocks[num_full], fresh[group]))
        child.keys, child.root = parent.keys[:num_full], parent.root
        child.num_published = min(parent.num_published, num_full)
        return Fork([list(blocks) for blocks in child.blocks], copies)

    # -- swapping ----------------------------------------------------------------------------------------------------

    def swap_out(self, request_id: str) -> list[tuple[int, int]] | None:
        table = self._tables.get(request_id)
        if self._host is None or table is None or table.host is not None:
            return None
        taken = self._host.take(sum(len(blocks) for blocks in table.blocks))
        if taken is None:
            return None
        table.host = [taken[group :: self.num_groups] for group in range(self.num_groups)]
        pairs = _pairs(table.blocks, table.host)
        for blocks in table.blocks:
            self.allocator.release(blocks[::-1])
        table.blocks = [[] for _ in range(self.num_groups)]
        table.num_published = 0
        return pairs

    def swap_in(self, request_id: str) -> list[tuple[int, int]] | None:
        table = self._tables.get(request_id)
        if self._host is None or table is None or table.host is None:
            return None
        taken = self.allocator.take(sum(len(blocks) for blocks in table.host))
        if taken is None:
            return None
        table.blocks = [taken[group :: self.num_groups] for group in range(self.num_groups)]
        pairs = _pairs(table.host, table.blocks)
        for blocks in table.host:
            self._host.release(blocks)
        table.host = None
        return pairs

    # -- books -------------------------------------------------------------------------------------------------------

    def reset(self) -> bool:
        return self.allocator.reset()

    def check_integrity(self) -> None:
        self.allocator.check_integrity()
        expected: dict[int, int] = {}
        held_on_host: list[int] = []
        for request_id, table in self._tables.items():
            lengths = {len(blocks) for blocks in table.blocks}
            assert len(lengths) == 1, f"block tables of request {request_id!r} differ in length"
            assert table.num_published <= lengths.pop(), f"request {request_id!r} published blocks that it does not hold"
            for block_id in (b for blocks in table.blocks for b in blocks):
                expected[block_id] = expected.get(block_id, 0) + 1
            held_on_host += [b for blocks in table.host or [] for b in blocks]
        for block_id in range(self.allocator.num_blocks):
            count = self.allocator.ref_count(block_id)
            assert count == expected.get(block_id, 0), f"block {block_id}: {count} references, not those of the tables"
        held = sum(count > 0 for count in expected.values())
        assert held + self.allocator.num_free + 1 == self.allocator.num_blocks, "blocks lost: held + free + null is not the total"
        if self._host is not None:
            self._host.check_integrity()
            assert len(held_on_host) == len(set(held_on_host)), "a host block belongs to two requests"
            assert len(held_on_host) + self._host.num_free == self._host.num_blocks - 1, "host blocks lost"

    @property
    def holders(self) -> set[str]:
        """Requests that hold device or host blocks."""
        return {request_id for request_id, table in self._tables.items() if table.blocks[0] or table.host}

    def num_blocks_of(self, request_id: str) -> int:
        table = self._tables.get(request_id)
        return len(table.blocks[0]) * self.num_groups if table else 0

    def num_freed_by(self, request_ids: Sequence[str]) -> int:
        """Blocks that would become free if all of these requests were freed together."""
        drops: dict[int, int] = {}
        for request_id in request_ids:
            table = self._tables.get(request_id)
            for block_id in (b for blocks in (table.blocks if table else []) for b in blocks):
                drops[block_id] = drops.get(block_id, 0) + 1
        return sum(self.allocator.ref_count(block_id) == count for block_id, count in drops.items())

    def _table(self, request_id: str) -> _Table:
        table = self._tables.get(request_id)
        if table is None:
            table = self._tables[request_id] = _Table(self.num_groups)
        return table


def _pairs(sources: BlockIds, destinations: BlockIds) -> list[tuple[int, int]]:
    return [pair for both in zip(sources, destinations, strict=True) for pair in zip(*both, strict=True)]
