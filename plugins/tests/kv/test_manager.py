"""The standard KV-cache manager over both allocators."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from pegboard.testing.conformance.kv_cache_manager import KVCacheManagerConformance
from pegboard_plugins.kv.manager import StandardKVCacheManager
from pegboard_plugins.kv.paged import PagedAllocator
from pegboard_plugins.kv.prefix import PrefixAllocator
from pegboard_plugins.kv.prefix_hash import extend_keys, root_key


class TestManagerWithPrefixCache(KVCacheManagerConformance):
    def make(
        self, num_blocks: int, block_size: int, num_host_blocks: int, windows: Sequence[int | None] = (None,)
    ) -> StandardKVCacheManager:
        return StandardKVCacheManager(PrefixAllocator(num_blocks, block_size), block_size, windows, num_host_blocks)

    def test_several_groups_share_one_pool(self) -> None:
        kv = StandardKVCacheManager(PrefixAllocator(9, 4), 4, (None, None))
        assert kv.max_tokens_per_request == 16
        tokens = list(range(9))
        added = kv.allocate_slots("r", 9)
        assert added is not None
        assert [len(blocks) for blocks in added] == [3, 3]
        assert len({b for blocks in added for b in blocks}) == 6
        kv.commit("r", tokens, 9)
        hit = kv.get_computed_blocks("s", tokens)
        assert hit.num_tokens == 8
        assert hit.block_ids == [blocks[:2] for blocks in added]
        assert kv.allocate_slots("s", 9, hit) is not None
        kv.check_integrity()
        kv.free("r")
        kv.free("s")
        assert kv.allocator.num_free == 8

    def test_a_hit_that_would_have_to_be_evicted_for_itself_does_not_fit(self) -> None:
        kv = self.make(4, 4, 0)
        tokens = list(range(12))
        kv.allocate_slots("r", 12)
        kv.commit("r", tokens, 12)
        kv.free("r")
        hit = kv.get_computed_blocks("s", tokens + tokens)
        assert hit.num_tokens == 12
        assert kv.allocate_slots("s", 24, hit) is None
        assert kv.get_computed_blocks("t", [*tokens, 0]).num_tokens == 12
        kv.check_integrity()

    def test_blocks_pending_release_are_counted_once(self) -> None:
        kv = self.make(8, 4, 0)
        tokens = list(range(9))
        kv.allocate_slots("a", 9)
        kv.commit("a", tokens, 9)
        kv.allocate_slots("b", 9, kv.get_computed_blocks("b", tokens))
        assert kv.num_freed_by(["a"]) == 1
        assert kv.num_freed_by(["a", "b"]) == 4


class TestManagerWithoutPrefixCache(KVCacheManagerConformance):
    caches_prefixes = False

    def make(
        self, num_blocks: int, block_size: int, num_host_blocks: int, windows: Sequence[int | None] = (None,)
    ) -> StandardKVCacheManager:
        return StandardKVCacheManager(PagedAllocator(num_blocks, block_size), block_size, windows, num_host_blocks)


def keys_of(token_ids: list[int], block_size: int = 4, salt: str | None = None, extra: tuple[bytes, ...] = ()) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root_key(block_size, salt, extra), token_ids, len(token_ids) // block_size, block_size)
    return keys


def test_a_key_stands_for_everything_before_it() -> None:
    base = keys_of([1, 2, 3, 4, 5, 6, 7, 8])
    assert len(set(base)) == 2
    assert keys_of([1, 2, 3, 4, 9, 9, 9, 9])[0] == base[0]
    assert keys_of([0, 2, 3, 4, 5, 6, 7, 8])[1] != base[1]
    assert keys_of([5, 6, 7, 8])[0] != base[1]
    assert keys_of([1, 2, 3, 4, 5, 6, 7, 8], block_size=8)[0] != base[1]


def test_salt_and_extra_keys_cannot_be_confused() -> None:
    tokens = [1, 2, 3, 4]
    variants = [
        keys_of(tokens),
        keys_of(tokens, salt="a"),
        keys_of(tokens, extra=(b"a",)),
        keys_of(tokens, extra=(b"salt:a",)),
        keys_of(tokens, salt="a", extra=(b"b",)),
        keys_of(tokens, extra=(b"a", b"b")),
        keys_of(tokens, extra=(b"ab",)),
    ]
    assert len({keys[0] for keys in variants}) == len(variants)
    assert keys_of(tokens, salt="") == keys_of(tokens)
    assert keys_of(tokens, salt="\ud800") != keys_of(tokens, salt="\ud801"), "any text is a salt"


def test_keys_grow_without_hashing_twice() -> None:
    tokens = list(range(20))
    keys = keys_of(tokens[:9])
    before = list(keys)
    extend_keys(keys, root_key(4), tokens, 5, 4)
    assert keys[:2] == before
    assert keys == keys_of(tokens)


def test_a_placeholder_is_never_hashed() -> None:
    with pytest.raises(Exception, match=r"integer|argument|range"):
        keys_of([1, 2, 3, -1])


def test_keys_are_the_same_in_every_process() -> None:
    code = (
        "from pegboard_plugins.kv.prefix_hash import *; k = []; extend_keys(k, root_key(4, 's'), list(range(8)), 2, 4);"
        "print(k[-1].hex())"
    )
    run = [sys.executable, "-c", code]
    outputs = {
        subprocess.run(run, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout.strip()
        for seed in ("1", "2")
    }
    assert outputs == {keys_of(list(range(8)), salt="s")[-1].hex()}
