"""Conformance of a KVCacheManager: examples, and a state machine against a model that knows what every block contains."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from hypothesis.stateful import run_state_machine_as_test

from pegboard.contracts.kv_allocator import NULL_BLOCK
from pegboard.contracts.kv_cache_manager import KVCacheManager
from pegboard.testing.conformance._kv_machine import BLOCK, ManagerMachine
from pegboard.testing.conformance._views import QUICK


class KVCacheManagerConformance(abc.ABC):
    """``make`` gives a manager of ``num_blocks`` blocks, the null block among them, for one KV-cache group for each entry of
    ``windows``: its sliding window, or None."""

    caches_prefixes: bool = True

    @abc.abstractmethod
    def make(
        self, num_blocks: int, block_size: int, num_host_blocks: int, windows: Sequence[int | None] = (None,)
    ) -> KVCacheManager: ...

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

    # windows ----------------------------------------------------------------------------------------------------------

    def test_what_is_behind_a_window_is_given_up(self) -> None:
        kv = self.make(12, BLOCK, 0, (None, 6))
        kv.allocate_slots("r", 14)
        whole, windowed = kv.block_ids("r")
        assert kv.release_passed("r", 8) == 0, "token 8 looks back to token 3"
        assert kv.release_passed("r", 9) == 1
        assert kv.release_passed("r", 9) == 0
        assert kv.release_passed("r", 14) == 1
        assert kv.block_ids("r") == [whole, [NULL_BLOCK] * 2 + windowed[2:]]
        kv.check_integrity()
        assert kv.allocate_slots("s", 2 * BLOCK) is not None, "3 blocks were free and 2 have become so"
        assert kv.release_passed("nobody", 9) == 0
        kv.free("r")
        kv.free("s")
        assert kv.allocate_slots("t", 5 * BLOCK) is not None

    def test_groups_with_windows_get_places_as_they_are_needed(self) -> None:
        kv = self.make(20, BLOCK, 0, (None, 6))
        added = kv.allocate_slots("r", 5, num_known=21)
        assert added is not None
        assert [len(blocks) for blocks in added] == [6, 2]
        more = kv.allocate_slots("r", 9, num_known=21)
        assert more is not None
        assert [len(blocks) for blocks in more] == [0, 1]
        kv.check_integrity()

    def test_a_prefix_ends_where_all_groups_have_what_its_next_token_sees(self) -> None:
        """The windowed group keeps three blocks of seven; the longest prefix ends with them, and shorter ones are not there."""
        kv, tokens = self.make(40, BLOCK, 0, (None, 6)), list(range(29))
        self.computed(kv, "r", tokens)
        kv.release_passed("r", 28)
        hit = kv.get_computed_blocks("s", tokens)
        if not self.caches_prefixes:
            assert hit.num_tokens == 0
            return
        assert hit.num_tokens == 28
        whole, windowed = kv.block_ids("r")
        assert hit.block_ids == [whole[:7], [NULL_BLOCK] * 5 + windowed[5:7]]
        assert kv.get_computed_blocks("t", tokens[:17]).num_tokens == 16, "given up, and not yet used for anything else"
        assert kv.allocate_slots("s", 29, hit) is not None
        kv.check_integrity()

    def test_evicted_blocks_of_a_window_shorten_a_prefix(self) -> None:
        if not self.caches_prefixes:
            return
        kv, tokens = self.make(15, BLOCK, 0, (None, 6)), list(range(25))
        self.computed(kv, "r", tokens)
        kv.release_passed("r", 24)
        kv.allocate_slots("other", BLOCK)  # takes one block for each group: the first ones behind the window
        assert kv.get_computed_blocks("s", tokens).num_tokens == 24
        assert kv.get_computed_blocks("t", tokens[:9]).num_tokens == 0, "tokens 3 to 7 are gone"
        assert kv.get_computed_blocks("u", tokens[:21]).num_tokens == 20

    def test_no_fork_from_what_a_window_has_passed(self) -> None:
        kv = self.make(20, BLOCK, 0, (None, 6))
        kv.allocate_slots("parent", 20)
        kv.release_passed("parent", 18)  # which looks back to token 13, in the block of tokens 12 to 15
        assert kv.fork("parent", "late", 16) is None, "token 16 looks back to token 11"
        assert kv.block_ids("late") == [[], []]
        fork = kv.fork("parent", "child", 18)
        assert fork is not None
        assert len(fork.copies) == 2
        assert [blocks[:3] for blocks in fork.block_ids][1] == [NULL_BLOCK] * 3
        kv.free("parent")
        kv.check_integrity()

    def test_null_blocks_are_not_swapped(self) -> None:
        kv = self.make(10, BLOCK, 5, (6,))
        kv.allocate_slots("r", 5 * BLOCK)
        kv.release_passed("r", 18)
        held = kv.block_ids("r")[0]
        out = kv.swap_out("r")
        assert out is not None
        assert [source for source, _ in out] == held[3:]
        back = kv.swap_in("r")
        assert back is not None
        assert [block for _, block in back] == kv.block_ids("r")[0][3:]
        assert kv.block_ids("r")[0][:3] == [NULL_BLOCK] * 3
        kv.check_integrity()

    # machines ---------------------------------------------------------------------------------------------------------

    def test_against_a_model(self) -> None:
        make, caches = self.make, self.caches_prefixes

        class Machine(ManagerMachine):
            make_manager = staticmethod(make)
            caches_prefixes = caches

        run_state_machine_as_test(Machine, settings=QUICK)
