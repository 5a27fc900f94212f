"""StandardKVCacheManager: the block tables of all requests, over any KVAllocator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from pegboard.contracts.kv_allocator import NULL_BLOCK, KVAllocator
from pegboard.contracts.kv_cache_manager import BlockIds, Fork, KVCacheManager, PrefixHit
from pegboard.wire.kv_cache import UNLIMITED, tokens_that_fit
from pegboard_plugins.kv.block_pool import BlockPool
from pegboard_plugins.kv.prefix_hash import extend_keys, group_keys, root_key
from pegboard_plugins.kv.prefix_search import longest_prefix
from pegboard_plugins.kv.table import Table, first_seen, leading_nulls


class StandardKVCacheManager(KVCacheManager):
    """Block tables over ``allocator``. ``windows`` has the sliding window of each KV-cache group, None for one that keeps all;
    all groups take their blocks from the same pool.

    ``num_host_blocks`` bounds what ``swap_out`` may move to the host. ``max_chunk``: the most tokens of one request that a step
    computes, which says how long a request can become. Nothing here knows of steps: a caller with plans in flight calls ``free``
    and ``release_passed`` when no plan can write the blocks any more.
    """

    def __init__(
        self,
        allocator: KVAllocator,
        block_size: int,
        windows: Sequence[int | None] = (None,),
        num_host_blocks: int = 0,
        max_chunk: int = UNLIMITED,
    ) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.windows = tuple(windows)
        self.num_groups = len(self.windows)
        self.has_windows = any(window is not None for window in self.windows)
        self.caches_prefixes = allocator.caches_prefixes
        self.num_passed = 0
        """Blocks given up because windows had passed them, since the start."""
        self.max_tokens_per_request = tokens_that_fit(allocator.num_blocks - 1, self.windows, block_size, max_chunk)
        self._tables: dict[str, Table] = {}
        self._host = BlockPool(num_host_blocks + 1, block_size) if num_host_blocks else None

    @property
    def num_usable_blocks(self) -> int:
        return self.allocator.num_blocks - 1

    # -- prefix cache ------------------------------------------------------------------------------------------------

    def get_computed_blocks(self, request_id: str, token_ids: Sequence[int], salt: str | None = None) -> PrefixHit:
        num_full = (len(token_ids) - 1) // self.block_size  # the last token is never a hit
        if not self.caches_prefixes or num_full <= 0:
            return PrefixHit()
        keys = self._keys(self._table(request_id), token_ids, num_full, salt)[:num_full]
        found = longest_prefix(keys, self.windows, self.block_size, self.allocator.lookup)
        length = len(found[0])
        return PrefixHit(found, length * self.block_size) if length else PrefixHit()

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed: int, salt: str | None = None) -> None:
        table = self._tables.get(request_id)
        num_full = min(num_computed, len(token_ids)) // self.block_size
        if not self.caches_prefixes or table is None or num_full <= table.num_published:
            return
        keys = self._keys(table, token_ids, num_full, salt)[table.num_published : num_full]
        for group, blocks in enumerate(table.blocks):
            for block_id, key in zip(blocks[table.num_published : num_full], group_keys(keys, group), strict=True):
                if block_id != NULL_BLOCK:
                    self.allocator.publish(block_id, key)
        table.num_published = num_full

    def _keys(self, table: Table, token_ids: Sequence[int], num_full: int, salt: str | None) -> list[bytes]:
        """Keys of at least ``num_full`` blocks; each is computed once per request."""
        if len(table.keys) < num_full:
            table.root = table.root or root_key(self.block_size, salt)
            extend_keys(table.keys, table.root, token_ids, num_full, self.block_size)
        return table.keys

    # -- block tables ------------------------------------------------------------------------------------------------

    def allocate_slots(
        self, request_id: str, num_tokens: int, hit: PrefixHit | None = None, reserve_blocks: int = 0, num_known: int = 0
    ) -> BlockIds | None:
        table = self._table(request_id)
        assert table.host is None, f"request {request_id!r} is swapped out"
        adopted: BlockIds = hit.block_ids if hit is not None and hit.num_tokens else [[] for _ in table.blocks]
        assert not (adopted[0] and table.blocks[0]), "a prefix hit is adopted on the first allocation only"
        counts = self._missing(table, num_tokens, num_known, len(adopted[0]))
        missing = sum(counts)
        allocator = self.allocator
        if adopted[0]:
            revived = sum(allocator.ref_count(b) == 0 and b != NULL_BLOCK for blocks in adopted for b in blocks)
        else:
            revived = 0
        if missing + revived + (reserve_blocks if missing or revived else 0) > allocator.num_free:
            return None
        for blocks in adopted:
            allocator.reference(blocks)  # before taking: a hit must not be evicted for its own request
        fresh = allocator.take(missing) if missing else []
        assert fresh is not None, "the allocator has fewer free blocks than it says"
        added, begin = [], 0
        for blocks, hits, count in zip(table.blocks, adopted, counts, strict=True):
            ids = hits + fresh[begin : begin + count]
            begin += count
            blocks += ids
            added.append(ids)
        if adopted[0]:
            table.num_published = len(adopted[0])
            table.passed = [leading_nulls(blocks) for blocks in adopted]
        return added

    def num_missing(self, request_id: str, num_tokens: int) -> int:
        """Blocks that the request lacks for ``num_tokens`` tokens."""
        return sum(self._missing(self._table(request_id), num_tokens, 0, 0))

    def _missing(self, table: Table, num_tokens: int, num_known: int, num_adopted: int) -> list[int]:
        """By group."""
        places = -(-num_tokens // self.block_size)
        whole = max(places, -(-num_known // self.block_size))
        if not self.has_windows:
            return [max(0, whole - len(table.blocks[0]) - num_adopted)] * self.num_groups
        return [
            max(0, (whole if window is None else places) - len(blocks) - num_adopted)
            for blocks, window in zip(table.blocks, self.windows, strict=True)
        ]

    def release_passed(self, request_id: str, num_computed: int) -> int:
        table, released = self._tables.get(request_id), 0
        if table is None or table.host is not None:
            return 0
        for group, window in enumerate(self.windows):
            first = first_seen(num_computed, window, self.block_size)
            if first > table.passed[group]:
                gone = table.pass_places(group, first)
                self.allocator.release(gone)  # the first of them is evicted first: a prefix that ends there is the shortest
                released += len(gone)
        self.num_passed += released
        return released

    def free(self, request_id: str) -> None:
        table = self._tables.pop(request_id, None)
        if table is None:
            return
        for blocks in table.held():
            self.allocator.release(blocks[::-1])  # tail first: the start of a prefix is worth more
        if table.host is not None and self._host is not None:
            for blocks in table.host:
                self._host.release(blocks)

    def block_ids(self, request_id: str) -> BlockIds:
        table = self._tables.get(request_id)
        return [list(blocks) for blocks in table.blocks] if table else [[] for _ in range(self.num_groups)]

    def can_fork(self, request_id: str, num_tokens: int) -> bool:
        """Whether the request has all that the token after its first ``num_tokens`` looks at."""
        table = self._tables[request_id]
        passed = zip(table.passed, self.windows, strict=True)
        return all(count <= first_seen(num_tokens, window, self.block_size) for count, window in passed)

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> Fork | None:
        parent = self._tables[parent_id]
        assert not self.num_blocks_of(child_id), f"request {child_id!r} has blocks already"
        num_full, partial = divmod(num_tokens, self.block_size)
        assert num_full + bool(partial) <= parent.num_places, "the parent holds fewer tokens than its child is to get"
        if not self.can_fork(parent_id, num_tokens):
            return None
        fresh = self.allocator.take(self.num_groups) if partial else [NULL_BLOCK] * self.num_groups
        if fresh is None:
            return None
        child = self._table(child_id)
        copies = []
        for group, blocks in enumerate(parent.blocks):
            shared = blocks[:num_full]
            self.allocator.reference(shared)
            child.blocks[group] = shared + ([fresh[group]] if partial else [])
            child.passed[group] = min(parent.passed[group], num_full)
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
        taken = self._host.take(table.num_held)
        if taken is None:
            return None
        table.host = _in_place_of(table.blocks, table.passed, taken)
        pairs = _pairs(table.blocks, table.host)
        for blocks in table.held():
            self.allocator.release(blocks[::-1])
        table.blocks = [[] for _ in range(self.num_groups)]
        table.num_published = 0
        return pairs

    def swap_in(self, request_id: str) -> list[tuple[int, int]] | None:
        table = self._tables.get(request_id)
        if self._host is None or table is None or table.host is None:
            return None
        taken = self.allocator.take(sum(len(blocks) for blocks in table.host) - sum(table.passed))
        if taken is None:
            return None
        table.blocks = _in_place_of(table.host, table.passed, taken)
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
            table.check(request_id)
            for block_id in (b for blocks in table.held() for b in blocks):
                expected[block_id] = expected.get(block_id, 0) + 1
            held_on_host += [b for blocks in table.host or [] for b in blocks if b != NULL_BLOCK]
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
        return {request_id for request_id, table in self._tables.items() if any(table.blocks) or table.host}

    def num_blocks_of(self, request_id: str) -> int:
        table = self._tables.get(request_id)
        return table.num_held if table else 0

    def num_places_of(self, request_id: str) -> int:
        """Places of the request's table that all groups have."""
        table = self._tables.get(request_id)
        return table.num_places if table else 0

    def num_freed_by(self, request_ids: Iterable[str], computed: Mapping[str, int] = MappingProxyType({})) -> int:
        """Blocks that would become free if all of ``request_ids`` were freed together, and those of ``computed`` gave up what is
        behind their windows when so many tokens are computed."""
        tables = self._tables
        gone = [blocks for request_id in request_ids if request_id in tables for blocks in tables[request_id].held()]
        for request_id, num_computed in computed.items():
            table = tables[request_id]
            for blocks, passed, window in zip(table.blocks, table.passed, self.windows, strict=True):
                gone.append(blocks[passed : first_seen(num_computed, window, self.block_size)])
        drops = Counter(block_id for blocks in gone for block_id in blocks)
        return sum(self.allocator.ref_count(block_id) == count for block_id, count in drops.items())

    def _table(self, request_id: str) -> Table:
        table = self._tables.get(request_id)
        if table is None:
            table = self._tables[request_id] = Table(self.num_groups)
        return table


def _in_place_of(tables: BlockIds, passed: Sequence[int], taken: list[int]) -> BlockIds:
    """Tables of equal shape, with ``taken`` where these hold a block."""
    made = []
    for blocks, count in zip(tables, passed, strict=True):
        num_held = len(blocks) - count
        made.append([NULL_BLOCK] * count + taken[:num_held])
        taken = taken[num_held:]
    return made


def _pairs(sources: BlockIds, destinations: BlockIds) -> list[tuple[int, int]]:
    both = zip(sources, destinations, strict=True)
    return [(source, to) for a, b in both for source, to in zip(a, b, strict=True) if source != NULL_BLOCK]
