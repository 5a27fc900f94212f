"""Conformance of a KVAllocator: examples, and a state machine against a model that only counts references."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from pegboard.contracts.kv_allocator import NULL_BLOCK, KVAllocator
from pegboard.testing.conformance._views import QUICK

Make = Callable[[int, int], KVAllocator]


class KVAllocatorConformance(abc.ABC):
    @abc.abstractmethod
    def make(self, num_blocks: int, block_size: int) -> KVAllocator: ...

    def test_all_but_the_null_block_can_be_taken(self) -> None:
        pool = self.make(8, 16)
        assert pool.num_blocks == 8
        assert pool.num_free == 7
        taken = pool.take(7)
        assert taken is not None
        assert sorted(taken) == [1, 2, 3, 4, 5, 6, 7]
        assert pool.take(1) is None
        assert pool.take(0) == []

    def test_take_is_all_or_nothing(self) -> None:
        pool = self.make(4, 16)
        assert pool.take(4) is None
        assert pool.num_free == 3
        pool.check_integrity()

    def test_the_last_release_frees(self) -> None:
        pool = self.make(4, 16)
        (block,) = pool.take(1) or []
        pool.reference([block])
        assert pool.ref_count(block) == 2
        pool.release([block])
        assert pool.num_free == 2
        pool.release([block])
        assert pool.num_free == 3
        assert pool.ref_count(block) == 0

    def test_releasing_a_free_block_is_an_error(self) -> None:
        pool = self.make(4, 16)
        with pytest.raises(ValueError, match="2"):
            pool.release([2])
        pool.check_integrity()

    def test_the_null_block_is_ignored(self) -> None:
        pool = self.make(4, 16)
        pool.reference([NULL_BLOCK])
        pool.release([NULL_BLOCK, NULL_BLOCK])
        assert pool.num_free == 3
        pool.check_integrity()

    def test_a_published_block_is_found_until_it_is_taken(self) -> None:
        pool = self.make(4, 16)
        first, second, third = pool.take(3) or []
        pool.publish(first, b"a")
        pool.publish(second, b"ab")
        pool.release([second, first, third])
        if not pool.caches_prefixes:
            assert pool.lookup([b"a", b"ab"]) == []
            return
        assert pool.lookup([b"a", b"ab", b"abc"]) == [first, second]
        assert pool.lookup([b"x", b"ab"]) == []
        assert pool.take(1) == [third], "a block without a key comes first"
        assert pool.take(1) == [second], "then the one released first"
        assert pool.lookup([b"a", b"ab"]) == [first]
        pool.reference([first])
        assert pool.num_free == 0
        assert pool.take(1) is None
        pool.release([first])
        assert pool.lookup([b"a"]) == [first]

    def test_a_key_stays_with_its_first_block(self) -> None:
        pool = self.make(4, 16)
        first, second = pool.take(2) or []
        pool.publish(first, b"a")
        pool.publish(second, b"a")
        assert pool.lookup([b"a"]) == ([first] if pool.caches_prefixes else [])
        pool.check_integrity()

    def test_reset_needs_an_idle_pool(self) -> None:
        pool = self.make(4, 16)
        (block,) = pool.take(1) or []
        pool.publish(block, b"a")
        assert pool.reset() is False
        assert pool.lookup([b"a"]) == ([block] if pool.caches_prefixes else [])
        pool.release([block])
        assert pool.reset() is True
        assert pool.lookup([b"a"]) == []
        assert pool.num_free == 3
        pool.check_integrity()

    def test_a_pool_without_usable_blocks_is_refused(self) -> None:
        with pytest.raises(ValueError, match="num_blocks=1"):
            self.make(1, 16)

    def test_against_a_model(self) -> None:
        make = self.make

        class Machine(AllocatorMachine):
            make_allocator = staticmethod(make)

        run_state_machine_as_test(Machine, settings=QUICK)


class AllocatorMachine(RuleBasedStateMachine):
    """``refs`` counts references, ``keys`` is what is published, ``released`` the cached free blocks, oldest release first."""

    make_allocator: Make

    @initialize(num_blocks=st.integers(2, 9))
    def start(self, num_blocks: int) -> None:
        self.pool = self.make_allocator(num_blocks, 4)
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.keys: dict[int, bytes] = {}
        self.released: list[int] = []

    def free_blocks(self) -> set[int]:
        return {b for b, count in self.refs.items() if count == 0}

    @rule(n=st.integers(0, 9))
    def take(self, n: int) -> None:
        free = self.free_blocks()
        taken = self.pool.take(n)
        if n > len(free):
            assert taken is None
            return
        assert taken is not None
        assert len(taken) == len(set(taken)) == n
        assert set(taken) <= free
        uncached = free - set(self.released)
        cached = [b for b in taken if b in self.released]
        assert taken[len(taken) - len(cached) :] == cached == self.released[: max(0, n - len(uncached))]
        for block in taken:
            self.refs[block] = 1
            self.keys.pop(block, None)
        self.released = [b for b in self.released if b not in taken]

    @precondition(lambda self: any(self.refs.values()))
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        held = sorted(b for b, count in self.refs.items() if count)
        blocks = data.draw(st.lists(st.sampled_from([*held, NULL_BLOCK]), unique=True, max_size=4))
        self.pool.release(blocks)
        for block in blocks:
            if block != NULL_BLOCK:
                self.refs[block] -= 1
                if self.refs[block] == 0 and block in self.keys:
                    self.released.append(block)

    @rule(data=st.data())
    def reference(self, data: Any) -> None:
        usable = sorted({b for b, count in self.refs.items() if count} | set(self.released) | {NULL_BLOCK})
        blocks = data.draw(st.lists(st.sampled_from(usable), unique=True, max_size=3))
        self.pool.reference(blocks)
        for block in blocks:
            if block != NULL_BLOCK:
                self.refs[block] += 1
        self.released = [b for b in self.released if b not in blocks]

    @precondition(lambda self: any(self.refs.values()))
    @rule(data=st.data(), key=st.sampled_from((b"a", b"b", b"c", b"d")))
    def publish(self, data: Any, key: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(b for b, count in self.refs.items() if count)))
        self.pool.publish(block, key)
        if self.pool.caches_prefixes and key not in self.keys.values():
            self.keys[block] = key

    @rule()
    def reset(self) -> None:
        idle = not any(self.refs.values())
        assert self.pool.reset() is idle
        if idle:
            self.keys.clear()
            self.released.clear()

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        assert self.pool.num_free == len(self.free_blocks())
        assert all(self.pool.ref_count(b) == count for b, count in self.refs.items())
        by_key = {key: block for block, key in self.keys.items()}
        for key in (b"a", b"b", b"c", b"d"):
            assert self.pool.lookup([key]) == ([by_key[key]] if key in by_key else [])
