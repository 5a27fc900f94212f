"""Sizes with which a kernel runs, and what they depend on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
SMALLEST_TILE = 16
"""Rows and columns of the smallest tile that tensor cores multiply."""


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """``block_m``: queries per tile (prefill only; 0 for decode). ``block_n``: keys per tile. ``num_stages``: depth of the
    pipeline, in which reading the block table takes as many stages as reading what it points to."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Problem:
    """What the best sizes depend on."""

    kernel: str
    """"decode" or "prefill"."""
    head_size: int
    group: int
    """Query heads per key head."""
    dtype: str
    kv_dtype: str
    block_size: int

    @property
    def key(self) -> str:
        """As text, for files."""
        return "-".join(str(value) for value in asdict(self).values())


def head_pad(head_size: int) -> int:
    """Columns of a tile that holds a head."""
    return max(SMALLEST_TILE, 1 << (head_size - 1).bit_length())


def group_pad(group: int) -> int:
    """Rows of a tile that holds the query heads of one key head."""
    return max(SMALLEST_TILE, 1 << (group - 1).bit_length())


def shared_bytes(problem: Problem, config: KernelConfig) -> int:
    """At most how much shared memory a program takes: tiles of keys and values as they lie in the cache, one of each as they are
    multiplied if that is another type, block ids, the queries, and the weights on their way between the two products."""
    columns, item, cached = head_pad(problem.head_size), ITEM_SIZES[problem.dtype], ITEM_SIZES[problem.kv_dtype]
    rows = config.block_m or group_pad(problem.group)
    buffers = max(min(config.num_stages, 2), config.num_stages // 2)
    tiles = 2 * buffers * config.block_n * columns * cached
    converted = 2 * config.block_n * columns * item if item != cached else 0
    block_ids = 4 * config.num_stages * config.block_n
    return tiles + converted + block_ids + rows * columns * item + rows * config.block_n * item


def fit(problem: Problem, config: KernelConfig, limit: int) -> KernelConfig:
    """``config`` with fewer stages, then smaller tiles, until it fits ``limit`` bytes of shared memory; and with rows enough for
    a group. Raises ``ValueError`` where nothing does."""
    if config.block_m and config.block_m < group_pad(problem.group):
        config = replace(config, block_m=group_pad(problem.group))
    while shared_bytes(problem, config) > limit:
        if config.num_stages > 1:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_n > SMALLEST_TILE:
            config = replace(config, block_n=config.block_n // 2)
        elif config.block_m > group_pad(problem.group):
            config = replace(config, block_m=config.block_m // 2)
        else:
            raise ValueError(f"{problem} needs {shared_bytes(problem, config)} bytes of shared memory, and there are {limit}")
    return config
