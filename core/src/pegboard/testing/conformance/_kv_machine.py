"""State machine of the KV-cache manager: any order of calls against a model that knows what every block contains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pegboard.contracts.kv_allocator import NULL_BLOCK
from pegboard.contracts.kv_cache_manager import KVCacheManager
from pegboard.testing.windows import first_seen

Windows = Sequence[int | None]
Make = Callable[[int, int, int, Windows], KVCacheManager]
BLOCK = 4
WINDOWS: Sequence[Windows] = ((None,), (None,), (None, None), (1,), (6,), (None, 5), (9, None, 2), (3, 10))

Entry = tuple[Any, ...]
"""What one place of the cache holds: group, salt and all tokens up to this one."""


@dataclass
class Held:
    """``computed`` of the ``tokens`` have been written. ``blocks``: by group, null where they were given up."""

    tokens: list[int]
    salt: str | None
    computed: int
    blocks: list[list[int]] = field(default_factory=list)
    host: list[list[int]] | None = None

    def entry(self, group: int, position: int) -> Entry:
        return (group, self.salt, *self.tokens[: position + 1])


def _blocks(tables: Sequence[Sequence[int]]) -> list[int]:
    return [block for blocks in tables for block in blocks if block != NULL_BLOCK]


class ManagerMachine(RuleBasedStateMachine):
    """``device`` and ``host`` map (block, offset) to its entry; ``held`` is what each request must read through its tables."""

    make_manager: Make
    caches_prefixes: bool

    @initialize(num_blocks=st.integers(2, 10), num_host_blocks=st.integers(0, 5), windows=st.sampled_from(WINDOWS))
    def start(self, num_blocks: int, num_host_blocks: int, windows: Windows) -> None:
        self.windows = windows
        self.num_blocks, self.num_host_blocks = 1 + (num_blocks - 1) * len(windows), num_host_blocks * len(windows)
        self.kv = self.make_manager(self.num_blocks, BLOCK, self.num_host_blocks, windows)
        self.held: dict[str, Held] = {}
        self.device: dict[tuple[int, int], Entry] = {}
        self.host: dict[tuple[int, int], Entry] = {}
        self.count = 0

    # -- the model -----------------------------------------------------------------------------------------------------

    def resident(self) -> list[str]:
        return sorted(name for name, held in self.held.items() if held.host is None)

    def in_use(self) -> set[int]:
        return {block for held in self.held.values() for block in _blocks(held.blocks)}

    def num_free(self) -> int:
        return self.num_blocks - 1 - len(self.in_use())

    def name(self) -> str:
        self.count += 1
        return f"r{self.count}"

    def missing(self, blocks: Sequence[Sequence[int]], num_tokens: int, num_known: int) -> int:
        """Blocks beside ``blocks`` that so many tokens need."""
        total = 0
        for held, window in zip(blocks, self.windows, strict=True):
            tokens = num_tokens if window is not None else max(num_tokens, num_known)
            total += max(0, -(-tokens // BLOCK) - len(held))
        return total

    def write(self, name: str, end: int) -> None:
        """Compute and publish the tokens up to ``end``."""
        held = self.held[name]
        for group, blocks in enumerate(held.blocks):
            for position in range(held.computed, end):
                block = blocks[position // BLOCK]
                others = [n for n, other in self.held.items() if n != name and block in _blocks(other.blocks)]
                assert not others, f"{name} writes block {block}, which {others} read"
                self.device[block, position % BLOCK] = held.entry(group, position)
        held.computed = end
        self.kv.commit(name, held.tokens, end, held.salt)

    def move(self, source: dict[tuple[int, int], Entry], to: dict[tuple[int, int], Entry], pairs: list[tuple[int, int]]) -> None:
        for a, b in pairs:
            for offset in range(BLOCK):
                if (a, offset) in source:
                    to[b, offset] = source[a, offset]

    # -- calls ---------------------------------------------------------------------------------------------------------

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        salt=st.sampled_from((None, "s")),
        reserve=st.integers(0, 2),
        chunk=st.integers(1, 14),
    )
    def admit(self, tokens: list[int], salt: str | None, reserve: int, chunk: int) -> None:
        name = self.name()
        new = Held(tokens, salt, 0)
        hit = self.kv.get_computed_blocks(name, tokens, salt)
        hits: list[list[int]] = hit.block_ids or [[] for _ in self.windows]
        assert {len(blocks) * BLOCK for blocks in hits} == {hit.num_tokens}
        assert hit.num_tokens < max(1, len(tokens))
        for group, (blocks, window) in enumerate(zip(hits, self.windows, strict=True)):
            first = first_seen(hit.num_tokens, window, BLOCK)
            assert blocks[:first] == [NULL_BLOCK] * first
            for position in range(first * BLOCK, hit.num_tokens):
                assert self.device[blocks[position // BLOCK], position % BLOCK] == new.entry(group, position)
        in_use = self.in_use()
        end = min(hit.num_tokens + chunk, len(tokens))
        missing = self.missing(hits, end, len(tokens))
        fits = missing + len(set(_blocks(hits)) - in_use) + reserve <= self.num_free()
        added = self.kv.allocate_slots(name, end, hit, reserve, len(tokens))
        assert (added is not None) == fits
        if added is None:
            self.kv.free(name)
            return
        fresh = [blocks[len(found) :] for blocks, found in zip(added, hits, strict=True)]
        assert [blocks[: len(found)] for blocks, found in zip(added, hits, strict=True)] == hits
        assert len(set(_blocks(fresh))) == missing
        assert not set(_blocks(fresh)) & in_use
        new.blocks, new.computed = added, hit.num_tokens
        self.held[name] = new
        self.write(name, end)

    @precondition(lambda self: self.resident())
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=6), chunk=st.integers(1, 14))
    def advance(self, data: Any, tokens: list[int], chunk: int) -> None:
        """Compute some of what is left, and of ``tokens`` that follow."""
        name = data.draw(st.sampled_from(self.resident()))
        held = self.held[name]
        known = [*held.tokens, *tokens]
        end = min(held.computed + chunk, len(known))
        missing = self.missing(held.blocks, end, 0)
        added = self.kv.allocate_slots(name, end)
        assert (added is not None) == (missing <= self.num_free())
        if added is not None:
            assert len(_blocks(added)) == missing
            held.blocks = [blocks + more for blocks, more in zip(held.blocks, added, strict=True)]
            held.tokens = known
            self.write(name, end)

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def release_passed(self, data: Any) -> None:
        name = data.draw(st.sampled_from(self.resident()))
        held = self.held[name]
        computed = data.draw(st.integers(0, held.computed))
        before = len(_blocks(held.blocks))
        for blocks, window in zip(held.blocks, self.windows, strict=True):
            first = first_seen(computed, window, BLOCK)
            blocks[:first] = [NULL_BLOCK] * first
        assert self.kv.release_passed(name, computed) == before - len(_blocks(held.blocks))

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
        num_tokens = data.draw(st.integers(1, source.computed))
        child = self.name()
        fork = self.kv.fork(parent, child, num_tokens)
        firsts = [first_seen(num_tokens, window, BLOCK) for window in self.windows]
        seen = all(NULL_BLOCK not in blocks[first:] for blocks, first in zip(source.blocks, firsts, strict=True))
        num_fresh = len(self.windows) if num_tokens % BLOCK else 0
        assert (fork is not None) == (seen and num_fresh <= self.num_free())
        if fork is not None:
            assert len(fork.copies) == num_fresh
            self.move(self.device, self.device, fork.copies)
            self.held[child] = Held(source.tokens[:num_tokens], source.salt, num_tokens, fork.block_ids)

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def swap_out(self, data: Any) -> None:
        name = data.draw(st.sampled_from(self.resident()))
        held = self.held[name]
        used = sum(len(_blocks(other.host or [])) for other in self.held.values())
        pairs = self.kv.swap_out(name)
        assert (pairs is not None) == (self.num_host_blocks > 0 and used + len(_blocks(held.blocks)) <= self.num_host_blocks)
        if pairs is not None:
            assert [source for source, _ in pairs] == _blocks(held.blocks)
            self.move(self.device, self.host, pairs)
            held.host, held.blocks = _replaced(held.blocks, pairs), [[] for _ in self.windows]

    @precondition(lambda self: any(held.host is not None for held in self.held.values()))
    @rule(data=st.data())
    def swap_in(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, held in self.held.items() if held.host is not None)))
        held = self.held[name]
        assert held.host is not None
        pairs = self.kv.swap_in(name)
        assert (pairs is not None) == (len(_blocks(held.host)) <= self.num_free())
        if pairs is not None:
            assert [source for source, _ in pairs] == _blocks(held.host)
            self.move(self.host, self.device, pairs)
            held.blocks, held.host = _replaced(held.host, pairs), None

    @rule()
    def reset(self) -> None:
        assert self.kv.reset() is not bool(self.in_use())

    @invariant()
    def everybody_reads_what_they_wrote(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity()
        for name, held in self.held.items():
            assert self.kv.block_ids(name) == held.blocks
            tables, data = (held.blocks, self.device) if held.host is None else (held.host, self.host)
            for group, (blocks, window) in enumerate(zip(tables, self.windows, strict=True)):
                assert NULL_BLOCK not in blocks[first_seen(held.computed, window, BLOCK) :]
                for position in range(held.computed):
                    block = blocks[position // BLOCK]
                    assert block == NULL_BLOCK or data[block, position % BLOCK] == held.entry(group, position)


def _replaced(tables: list[list[int]], pairs: list[tuple[int, int]]) -> list[list[int]]:
    """The same tables with the second of each pair in place of the first."""
    moved = {NULL_BLOCK: NULL_BLOCK, **dict(pairs)}
    return [[moved[block] for block in blocks] for blocks in tables]
