"""KVAllocator: hands out KV-cache blocks. Bookkeeping only, no tensors."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Final

API: Final = 1

NULL_BLOCK: Final = 0
"""Id of the block that never holds data and is never handed out; stands for positions that need no storage."""


class KVAllocator(abc.ABC):
    """A pool of ``num_blocks`` blocks, ids ``0 … num_blocks - 1``; block 0 is the null block. Constructed with ``num_blocks``
    and ``block_size``.

    A block is *free* (reference count 0), or *referenced*. A free block may still be *cached*: it has a key under which
    ``lookup`` finds it, and keeps it until it is taken for other data. An allocator without prefix caching ignores keys.

    Invariants: the sum of free and referenced blocks is ``num_blocks - 1``; a referenced block is never handed out by
    ``take``; ``take`` either returns n distinct blocks or None without side effects; keys of distinct blocks differ.
    """

    caches_prefixes: bool = False

    @abc.abstractmethod
    def take(self, n: int) -> list[int] | None:
        """n free blocks with reference count 1, uncached blocks and the least recently released first; None if fewer are free."""

    @abc.abstractmethod
    def reference(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each (free cached blocks leave the free list). The null block is ignored."""

    @abc.abstractmethod
    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference from each, in the given order: earlier ids are evicted earlier. The null block is ignored.
        Raises ``ValueError`` on a block that has no reference."""

    @abc.abstractmethod
    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix of ``keys`` that is cached. Adds no reference."""

    @abc.abstractmethod
    def publish(self, block_id: int, key: bytes) -> None:
        """Make a full, computed block findable. A key that another block has already is left with that block."""

    @abc.abstractmethod
    def ref_count(self, block_id: int) -> int: ...

    @property
    @abc.abstractmethod
    def num_blocks(self) -> int: ...

    @property
    @abc.abstractmethod
    def num_free(self) -> int:
        """Blocks that ``take`` could hand out, cached ones included."""

    @abc.abstractmethod
    def reset(self) -> bool:
        """Forget all keys. False, and nothing changed, while any block is referenced."""

    @abc.abstractmethod
    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the books do not balance."""
