"""Shapes of the KV cache, agreed between workers (which own the tensors) and scheduler (which owns the bookkeeping)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}

UNLIMITED: Final = 1 << 62
"""More tokens than any request has."""


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one attention layer stores per block: ``num_vectors`` vectors of ``head_size`` numbers for each token and key head."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    sliding_window: int | None = None
    """No token is read by one that comes ``sliding_window`` or more tokens later. None: all are kept."""
    num_vectors: int = 2
    """Keys and values. 1 for a layer that derives both from one stored vector."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.num_vectors * self.block_size * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]


class KVCacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share one block table: they store alike and look back equally far. ``spec`` is that of each of them."""

    layers: list[str]
    spec: KVCacheSpec


class KVCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``num_blocks`` device blocks (block 0 is the null block and never holds data) and ``num_host_blocks`` for swapping. All
    groups take their blocks from these: whichever group has a block, its n-th layer keeps it in the n-th tensor of a worker."""

    num_blocks: int
    groups: list[KVCacheGroup]
    num_host_blocks: int = 0

    @property
    def block_size(self) -> int:
        return self.groups[0].spec.block_size

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each group."""
        return tuple(group.spec.sliding_window for group in self.groups)

    def tokens_per_request(self, max_chunk: int) -> int:
        """Tokens that fit when one request holds every block but the null block; ``max_chunk``: see ``window_blocks``."""
        return tokens_that_fit(self.num_blocks - 1, self.windows, self.block_size, max_chunk)


def window_blocks(window: int, block_size: int, max_chunk: int) -> int:
    """The most blocks of a group with a sliding window that a request holds at a time, when a step computes at most ``max_chunk``
    of its tokens and blocks are given up once that step is over: what the first of these tokens can see and all of them, cut
    off at neither end, and one block for those that are given up only when another one is full."""
    return -(-(window - 1 + max_chunk) // block_size) + 2


def blocks_needed(num_tokens: int, windows: Iterable[int | None], block_size: int, max_chunk: int) -> int:
    """The most blocks that a request of ``num_tokens`` tokens holds at a time, over all groups."""
    places = -(-num_tokens // block_size)
    return sum(places if w is None else min(places, window_blocks(w, block_size, max_chunk)) for w in windows)


def tokens_that_fit(num_blocks: int, windows: Sequence[int | None], block_size: int, max_chunk: int) -> int:
    """The longest request, in whole blocks, that never needs more than ``num_blocks``. ``UNLIMITED`` where all groups have
    windows and there are enough blocks for them."""
    bounds = sorted(window_blocks(w, block_size, max_chunk) for w in windows if w is not None)
    num_groups = len(windows)
    for bound in bounds:
        if num_blocks // num_groups < bound:
            break
        num_blocks, num_groups = num_blocks - bound, num_groups - 1  # this group never needs more
    return num_blocks // num_groups * block_size if num_groups else UNLIMITED


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker measured in its memory phase, in bytes."""

    weights: int
    """Resident model weights."""
    activations: int
    """Growth of resident memory during the dummy step."""
    resident: int
    """Resident memory of the whole process after the dummy step."""
    available: int
    """What is left for the KV cache under the stated budget or limit."""
    reason: str
    """How ``available`` was found, for the log and for errors."""
    graphs: int = 0
    """What captured graphs will take, as far as ``available`` depends on it."""


class World(msgspec.Struct, frozen=True, kw_only=True):
    """Place of one worker among all: ranks count TP first, then PP, then DP.

    ``rendezvous``: where the ranks of this engine meet, made by the executor: a directory that all of them see, or ``tcp://host:port``.
    ``local_rank``, ``local_size``: its number among the ranks of its host, and how many these are; None: all.
    """

    rank: int = 0
    local_rank: int = 0
    local_size: int | None = None
    tp_size: int = 1
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    rendezvous: str = ""

    @property
    def size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def num_neighbours(self) -> int:
        """Ranks of this engine that share this rank's host, itself among them."""
        return self.local_size or self.size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        return self.rank // self.tp_size

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def output_rank(self) -> int:
        """The rank whose result crosses back: first TP rank of the last stage."""
        return self.size - self.tp_size
