"""Conformance of a KVCacheManager: examples, and a state machine against a model that knows what every block contains."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from pegboard.contracts.kv_cache_manager import KVCacheManager
from pegboard.testing.conformance._views import QUICK

Make = Callable[[int, int, int], KVCacheManager]
BLOCK = 4


class KVCacheManagerConformance(abc.ABC):
    """``make`` gives a manager of ``num_blocks`` blocks, the null block among them, for one KV-cache group."""

    caches_prefixes: bool = True

    @abc.abstractmethod
    def make(self, num_blocks: int, block_size: int, num_host_blocks: int) -> KVCacheManager: ...

    def computed(self, kv: KVCacheManager, request_id: str, token_ids: list[int], salt: str | None = None) -> int:
        """Run a request through: returns the tokens of its prefix hit."""
        hit = kv.get_computed_blocks(request_id, token_ids, salt)
        assert kv.allocate_slots(request_id, len(token_ids), hit) is not None
        kv.commit(request_id, token_ids, len(token_ids), salt)
        return hit.num_tokens

    def test_tables_grow_by_what_is_returned(self) -> None:
        kv = self.make(8, BLOCK, 0)
        first = kv.allocate_slots("r", 5)
        assert first is not None
        assert len(first[0]) == 2
        assert kv.allocate_slots("r", 8) == [[]]
        more = kv.allocate_slots("r", 9)
        assert more is not None
        assert kv.block_ids("r") == [first[0] + more[0]]
        kv.check_integrity()

    def test_a_failed_allocation_changes_nothing(self) -> None:
        kv = self.make(4, BLOCK, 0)
        assert kv.allocate_slots("r", 8) is not None
        before = kv.block_ids("r")
        assert kv.allocate_slots("r", 16) is None
        assert kv.allocate_slots("other", 8) is None
        assert kv.allocate_slots("r", 12, reserve_blocks=1) is None
        assert kv.block_ids("r") == before
        assert kv.block_ids("other") == [[]]
        kv.check_integrity()
        assert kv.allocate_slots("r", 12) is not None

    def test_freeing_is_complete_and_harmless_twice(self) -> None:
        kv = self.make(4, BLOCK, 0)
        kv.allocate_slots("r", 12)
        kv.free("r")
        kv.free("r")
        kv.free("nobody")
        assert kv.block_ids("r") == [[]]
        assert kv.allocate_slots("big", 12) is not None

    def test_hits_stop_before_the_last_token(self) -> None:
        for length in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 3 * BLOCK):
            kv = self.make(16, BLOCK, 0)
            tokens = list(range(length))
            hits = []
            for turn in range(3):
                hits.append(self.computed(kv, f"r{turn}", tokens))
                kv.free(f"r{turn}")
            expected = (length - 1) // BLOCK * BLOCK if self.caches_prefixes else 0
            assert hits == [0, expected, expected]

    def test_a_salt_separates_equal_tokens(self) -> None:
        kv = self.make(32, BLOCK, 0)
        hits = [self.computed(kv, f"r{i}", list(range(9)), salt) for i, salt in enumerate(["a", "a", "b", None, None])]
        assert hits == ([0, 8, 0, 0, 8] if self.caches_prefixes else [0] * 5)

    def test_reset_forgets_but_only_when_idle(self) -> None:
        kv = self.make(8, BLOCK, 0)
        self.computed(kv, "r", list(range(9)))
        assert kv.reset() is False
        kv.free("r")
        assert kv.reset() is True
        assert self.computed(kv, "again", list(range(9))) == 0

    def test_a_fork_shares_full_blocks_and_copies_the_last(self) -> None:
        kv = self.make(8, BLOCK, 0)
        kv.allocate_slots("parent", 10)
        fork = kv.fork("parent", "child", 10)
        assert fork is not None
        ((parent,),) = [kv.block_ids("parent")]
        ((child,),) = [kv.block_ids("child")]
        assert child[:2] == parent[:2]
        assert child[2] != parent[2]
        assert fork.copies == [(parent[2], child[2])]
        assert fork.block_ids == [child]
        kv.free("parent")
        kv.check_integrity()
        assert kv.block_ids("child") == [child]

    def test_a_fork_that_goes_its_own_way_is_found_under_its_own_tokens(self) -> None:
        kv = self.make(16, BLOCK, 0)
        prompt, other = list(range(9)), [*range(5), 91, 92, 93, 94]
        kv.get_computed_blocks("parent", prompt)
        kv.allocate_slots("parent", 5)
        kv.commit("parent", prompt, 5)
        assert kv.fork("parent", "child", 5) is not None
        kv.allocate_slots("child", 9)
        kv.commit("child", other, 9)
        assert kv.get_computed_blocks("a", prompt).num_tokens == (4 if self.caches_prefixes else 0)
        assert kv.get_computed_blocks("b", other).num_tokens == (8 if self.caches_prefixes else 0)

    def test_a_fork_at_the_end_of_a_block_shares_everything(self) -> None:
        kv = self.make(4, BLOCK, 0)
        kv.allocate_slots("parent", 3 * BLOCK)
        fork = kv.fork("parent", "child", 2 * BLOCK)
        assert fork is not None, "no block is free, and none is needed"
        assert fork.copies == []
        assert fork.block_ids == kv.block_ids("child") == [kv.block_ids("parent")[0][:2]]
        kv.free("parent")
        kv.check_integrity()
        more = kv.allocate_slots("child", 2 * BLOCK + 1)
        assert more is not None
        assert len(more[0]) == 1

    def test_a_fork_that_finds_no_block_changes_nothing(self) -> None:
        kv = self.make(4, BLOCK, 0)
        kv.allocate_slots("parent", 3 * BLOCK)
        assert kv.fork("parent", "child", BLOCK + 1) is None
        assert kv.block_ids("child") == [[]]
        kv.check_integrity()
        kv.free("parent")
        assert kv.allocate_slots("other", 3 * BLOCK) is not None

    def test_a_request_that_looked_for_a_prefix_may_be_forked(self) -> None:
        kv, tokens = self.make(8, BLOCK, 0), list(range(2 * BLOCK + 1))
        self.computed(kv, "parent", tokens)
        kv.get_computed_blocks("child", tokens)
        assert kv.fork("parent", "child", len(tokens) - 1) is not None
        assert kv.allocate_slots("child", len(tokens)) is not None
        kv.check_integrity()

    def test_a_fork_publishes_what_its_parent_did_not(self) -> None:
        kv, tokens = self.make(8, BLOCK, 0), list(range(2 * BLOCK))
        kv.get_computed_blocks("parent", tokens)
        kv.allocate_slots("parent", 2 * BLOCK)
        kv.commit("parent", tokens, BLOCK)
        kv.fork("parent", "child", 2 * BLOCK)
        kv.free("parent")
        kv.commit("child", tokens, 2 * BLOCK)
        assert kv.get_computed_blocks("next", [*tokens, 0]).num_tokens == (2 * BLOCK if self.caches_prefixes else 0)

    def test_of_a_freed_request_the_start_survives_longest(self) -> None:
        kv = self.make(4, BLOCK, 0)
        tokens = list(range(12))
        self.computed(kv, "r", tokens)
        kv.free("r")
        kv.allocate_slots("s", BLOCK)
        assert kv.get_computed_blocks("t", [*tokens, 0]).num_tokens == (8 if self.caches_prefixes else 0)

    def test_without_host_blocks_nothing_is_swapped(self) -> None:
        kv = self.make(4, BLOCK, 0)
        kv.allocate_slots("r", 4)
        assert kv.swap_out("r") is None
        assert len(kv.block_ids("r")[0]) == 1

    def test_swapping_out_and_in(self) -> None:
        kv = self.make(4, BLOCK, 3)
        kv.allocate_slots("r", 12)
        device = kv.block_ids("r")[0]
        out = kv.swap_out("r")
        assert out is not None
        assert [source for source, _ in out] == device
        kv.check_integrity()
        kv.allocate_slots("s", 4)
        assert kv.swap_out("s") is None, "the host is full"
        assert kv.swap_in("r") is None, "the device is full"
        kv.free("s")
        back = kv.swap_in("r")
        assert back is not None
        assert [host for host, _ in back] == [host for _, host in out]
        assert [block for _, block in back] == kv.block_ids("r")[0]
        kv.check_integrity()

    def test_freeing_what_is_swapped_out_frees_the_host(self) -> None:
        kv = self.make(4, BLOCK, 3)
        for _ in range(3):
            kv.allocate_slots("r", 12)
            assert kv.swap_out("r") is not None
            kv.free("r")
            kv.check_integrity()

    def test_against_a_model(self) -> None:
        make, caches = self.make, self.caches_prefixes

        class Machine(ManagerMachine):
            make_manager = staticmethod(make)
            caches_prefixes = caches

        run_state_machine_as_test(Machine, settings=QUICK)


Entry = tuple[Any, ...]
"""What one place of the cache holds: salt and all tokens up to this one."""


@dataclass
class _Held:
    tokens: list[int]
    salt: str | None
    blocks: list[int] = field(default_factory=list)
    host: list[int] | None = None

    def entry(self, position: int) -> Entry:
        return (self.salt, *self.tokens[: position + 1])


class ManagerMachine(RuleBasedStateMachine):
    """``device`` and ``host`` map (block, offset) to its entry; ``held`` is what each request must read through its table."""

    make_manager: Make
    caches_prefixes: bool

    @initialize(num_blocks=st.integers(2, 10), num_host_blocks=st.integers(0, 5))
    def start(self, num_blocks: int, num_host_blocks: int) -> None:
        self.kv = self.make_manager(num_blocks, BLOCK, num_host_blocks)
        self.num_blocks, self.num_host_blocks = num_blocks, num_host_blocks
        self.held: dict[str, _Held] = {}
        self.device: dict[tuple[int, int], Entry] = {}
        self.host: dict[tuple[int, int], Entry] = {}
        self.count = 0

    def resident(self) -> list[str]:
        return sorted(name for name, held in self.held.items() if held.host is None)

    def num_free(self) -> int:
        return self.num_blocks - 1 - len({b for held in self.held.values() for b in held.blocks})

    def write(self, name: str, first: int) -> None:
        held = self.held[name]
        for position in range(first, len(held.tokens)):
            block = held.blocks[position // BLOCK]
            others = [n for n, other in self.held.items() if n != name and block in other.blocks]
            assert not others, f"{name} writes block {block}, which {others} read"
            self.device[block, position % BLOCK] = held.entry(position)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        salt=st.sampled_from((None, "s")),
        reserve=st.integers(0, 2),
    )
    def admit(self, tokens: list[int], salt: str | None, reserve: int) -> None:
        name = f"r{self.count}"
        self.count += 1
        new = _Held(tokens, salt)
        hit = self.kv.get_computed_blocks(name, tokens, salt)
        hits = hit.block_ids[0] if hit.block_ids else []
        assert hit.num_tokens == len(hits) * BLOCK < max(1, len(tokens))
        for position in range(hit.num_tokens):
            assert self.device[hits[position // BLOCK], position % BLOCK] == new.entry(position)
        in_use = {b for held in self.held.values() for b in held.blocks}
        fresh = -(-len(tokens) // BLOCK) - len(hits)
        fits = fresh + len(set(hits) - in_use) + reserve <= self.num_free()
        added = self.kv.allocate_slots(name, len(tokens), hit, reserve)
        assert (added is not None) == fits
        if added is None:
            self.kv.free(name)
            return
        assert added[0][: len(hits)] == hits
        assert not set(added[0][len(hits) :]) & in_use
        new.blocks = added[0]
        self.held[name] = new
        self.write(name, hit.num_tokens)
        self.kv.commit(name, tokens, len(tokens), salt)

    @precondition(lambda self: self.resident())
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def grow(self, data: Any, tokens: list[int]) -> None:
        name = data.draw(st.sampled_from(self.resident()))
        held = self.held[name]
        before, total = len(held.tokens), len(held.tokens) + len(tokens)
        need = -(-total // BLOCK) - len(held.blocks)
        added = self.kv.allocate_slots(name, total)
        assert (added is not None) == (need <= self.num_free())
        if added is not None:
            held.blocks = held.blocks + added[0]
            held.tokens = held.tokens + tokens
            self.write(name, before)
            self.kv.commit(name, held.tokens, total, held.salt)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.kv.free(name)
        del self.held[name]

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        parent = data.draw(st.sampled_from(self.resident()))
        source = self.held[parent]
        num_tokens = data.draw(st.integers(1, len(source.tokens)))
        child = f"r{self.count}"
        self.count += 1
        fork = self.kv.fork(parent, child, num_tokens)
        fits = num_tokens % BLOCK == 0 or self.num_free() > 0
        assert (fork is not None) == fits
        if fork is None:
            return
        for copied, destination in fork.copies:
            for offset in range(BLOCK):
                if (copied, offset) in self.device:
                    self.device[destination, offset] = self.device[copied, offset]
        self.held[child] = _Held(source.tokens[:num_tokens], source.salt, fork.block_ids[0])

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def swap_out(self, data: Any) -> None:
        name = data.draw(st.sampled_from(self.resident()))
        held = self.held[name]
        used = sum(len(other.host or []) for other in self.held.values())
        pairs = self.kv.swap_out(name)
        assert (pairs is not None) == (self.num_host_blocks > 0 and used + len(held.blocks) <= self.num_host_blocks)
        if pairs is not None:
            assert [source for source, _ in pairs] == held.blocks
            for source, destination in pairs:
                for offset in range(BLOCK):
                    if (source, offset) in self.device:
                        self.host[destination, offset] = self.device[source, offset]
            held.host, held.blocks = [destination for _, destination in pairs], []

    @precondition(lambda self: any(held.host is not None for held in self.held.values()))
    @rule(data=st.data())
    def swap_in(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, held in self.held.items() if held.host is not None)))
        held = self.held[name]
        assert held.host is not None
        pairs = self.kv.swap_in(name)
        assert (pairs is not None) == (len(held.host) <= self.num_free())
        if pairs is not None:
            assert [source for source, _ in pairs] == held.host
            for source, destination in pairs:
                for offset in range(BLOCK):
                    if (source, offset) in self.host:
                        self.device[destination, offset] = self.host[source, offset]
            held.host, held.blocks = None, [destination for _, destination in pairs]

    @rule()
    def reset(self) -> None:
        assert self.kv.reset() is not any(held.blocks for held in self.held.values())

    @invariant()
    def everybody_reads_what_they_wrote(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity()
        for name, held in self.held.items():
            assert self.kv.block_ids(name) == [held.blocks]
            assert len(held.blocks) == (0 if held.host is not None else -(-len(held.tokens) // BLOCK))
            for position in range(len(held.tokens)):
                place = position // BLOCK, position % BLOCK
                read = (
                    self.device[held.blocks[place[0]], place[1]]
                    if held.host is None
                    else self.host[held.host[place[0]], place[1]]
                )
                assert read == held.entry(position)
