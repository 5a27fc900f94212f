"""Table: the blocks of one request, in token order, one list per KV-cache group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pegboard.contracts.kv_allocator import NULL_BLOCK
from pegboard.contracts.kv_cache_manager import BlockIds


class Table:
    """What one request holds.

    ``blocks``: a place for every ``block_size`` tokens. The first ``passed`` places of a group are behind its window and hold the
    null block. Lists of groups with a window may be shorter than others: they get places as they are needed. ``keys``: of the
    request's full blocks, as far as they were needed, chained to ``root``. ``num_published``: leading places already offered to
    the allocator. ``host``: set while swapped out, place by place like ``blocks``.
    """

    __slots__ = ("blocks", "host", "keys", "num_published", "passed", "root")

    def __init__(self, num_groups: int) -> None:
        self.blocks: BlockIds = [[] for _ in range(num_groups)]
        self.passed = [0] * num_groups
        self.host: BlockIds | None = None
        self.keys: list[bytes] = []
        self.root = b""
        self.num_published = 0

    @property
    def num_places(self) -> int:
        """Places that all groups have."""
        return len(self.blocks[0]) if len(self.blocks) == 1 else min(map(len, self.blocks))

    @property
    def num_held(self) -> int:
        return sum(len(blocks) for blocks in self.blocks) - sum(self.passed if self.host is None else ())

    def held(self) -> Iterator[list[int]]:
        """The blocks of each group that are not behind its window."""
        for blocks, passed in zip(self.blocks, self.passed, strict=True):
            yield blocks[passed:] if passed else blocks

    def pass_places(self, group: int, num_places: int) -> list[int]:
        """The first ``num_places`` are behind the window of ``group``. Returns the blocks that were there, first places first."""
        blocks, passed = self.blocks[group], self.passed[group]
        gone = blocks[passed:num_places]
        blocks[passed:num_places] = [NULL_BLOCK] * len(gone)
        self.passed[group] = passed + len(gone)
        return gone

    def check(self, name: str) -> None:
        """Raise ``AssertionError`` where null blocks are not exactly those that were passed."""
        tables = self.blocks if self.host is None else self.host
        for blocks, passed in zip(tables, self.passed, strict=True):
            assert set(blocks[:passed]) <= {NULL_BLOCK}, f"request {name!r} holds blocks behind its window"
            assert NULL_BLOCK not in blocks[passed:], f"request {name!r} lacks a block that it may read"
        if self.host is not None:
            assert not any(self.blocks), f"request {name!r} is swapped out and holds blocks"
        assert self.num_published <= self.num_places, f"request {name!r} published blocks that it does not hold"


def first_seen(num_tokens: int, window: int | None, block_size: int) -> int:
    """The first place that a token after ``num_tokens`` others looks at: those before it are behind the window."""
    return 0 if window is None else max(0, num_tokens - window + 1) // block_size


def leading_nulls(blocks: Sequence[int]) -> int:
    return next((i for i, block_id in enumerate(blocks) if block_id != NULL_BLOCK), len(blocks))
