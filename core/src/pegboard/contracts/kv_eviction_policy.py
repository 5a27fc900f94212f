"""KVEvictionPolicy: which cached, unreferenced block is given up first."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

API: Final = 1


@dataclass(frozen=True, slots=True)
class BlockView:
    """A free cached block: ``released_at`` counts releases, ``depth`` is its place in its prefix chain, from 0."""

    block_id: int
    released_at: int
    depth: int
    hits: int


class KVEvictionPolicy(abc.ABC):
    """Ranks free cached blocks. Uncached free blocks are always taken before any of them.

    Invariants: pure; yields ids among the candidates, each at most once. Blocks it leaves out follow in release order.
    """

    @abc.abstractmethod
    def rank(self, candidates: Iterable[BlockView], need: int) -> Iterator[int]:
        """Ids in the order in which they should be evicted; at least ``need`` of them, or abstain by yielding fewer."""
