"""Shapes of the KV cache, agreed between workers (which own the tensors) and scheduler (which owns the bookkeeping)."""

from __future__ import annotations

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one attention layer stores per block."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    sliding_window: int | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer: keys and values."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]


class KVCacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share one block table because they store the same per block."""

    layers: list[str]
    spec: KVCacheSpec


class KVCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``num_blocks`` device blocks (block 0 is the null block and never holds data) and ``num_host_blocks`` for swapping."""

    num_blocks: int
    groups: list[KVCacheGroup]
    num_host_blocks: int = 0

    @property
    def block_size(self) -> int:
        return self.groups[0].spec.block_size

    @property
    def usable_tokens(self) -> int:
        """Tokens that fit when one request holds every block but the null block."""
        return (self.num_blocks - 1) * self.block_size


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
