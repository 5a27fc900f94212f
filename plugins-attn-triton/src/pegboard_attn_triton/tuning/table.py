"""The shipped sizes. They are reasoned from what a multiprocessor has, not measured: tune on your device to replace them.

Decode reads each key and value once, so it wants bytes in flight: about 25 KB per multiprocessor on an H100 or H200 (4 TB/s and
more times 0.7 us, by 132), half of that on an A100. A tile of 64 keys and values of 128 16-bit numbers is 32 KB. Of a pipeline's
stages every second one holds such a tile (the others the block ids that say where it lies): five stages hold two, and two or
three programs share a multiprocessor's memory.

Prefill multiplies: 128 queries by 64 or 128 keys fill the tensor cores. Sums and scores live in registers (128 x 128 float32
numbers are 64 of a thread's 255 with 8 warps; 4 warps spill), keys and values in shared memory (164 KB per multiprocessor on
sm_80, 228 KB on sm_90). Heads of 256 halve the tiles. float32 runs without tensor cores, on small tiles.
"""

from __future__ import annotations

from pegboard_attn_triton.tuning.config import ITEM_SIZES, KernelConfig, Problem, fit, head_pad

SHARED_MEMORY = {
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 7): 166_912,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (12, 0): 101_376,
}
"""Most bytes of shared memory per program, by compute capability."""

TABLE: dict[tuple[int, str, int, int], KernelConfig] = {
    # (sm, kernel, head size up to, bytes of an item of the cache): block_m, block_n, num_warps, num_stages
    (80, "decode", 64, 2): KernelConfig(0, 128, 4, 5),
    (80, "decode", 128, 2): KernelConfig(0, 64, 4, 5),
    (80, "decode", 256, 2): KernelConfig(0, 32, 4, 5),
    (80, "decode", 64, 1): KernelConfig(0, 128, 4, 5),
    (80, "decode", 128, 1): KernelConfig(0, 64, 4, 5),
    (80, "decode", 256, 1): KernelConfig(0, 32, 4, 5),
    (80, "decode", 64, 4): KernelConfig(0, 32, 4, 5),
    (80, "decode", 128, 4): KernelConfig(0, 32, 4, 3),
    (80, "decode", 256, 4): KernelConfig(0, 16, 4, 3),
    (80, "prefill", 64, 2): KernelConfig(128, 64, 8, 3),
    (80, "prefill", 128, 2): KernelConfig(128, 64, 8, 3),
    (80, "prefill", 256, 2): KernelConfig(64, 32, 8, 3),
    (80, "prefill", 64, 1): KernelConfig(128, 64, 8, 3),
    (80, "prefill", 128, 1): KernelConfig(128, 32, 8, 3),
    (80, "prefill", 256, 1): KernelConfig(64, 32, 8, 3),
    (80, "prefill", 64, 4): KernelConfig(32, 32, 4, 1),
    (80, "prefill", 128, 4): KernelConfig(32, 16, 4, 1),
    (80, "prefill", 256, 4): KernelConfig(16, 16, 4, 1),
    (90, "decode", 64, 2): KernelConfig(0, 128, 4, 5),
    (90, "decode", 128, 2): KernelConfig(0, 64, 4, 5),
    (90, "decode", 256, 2): KernelConfig(0, 32, 4, 5),
    (90, "decode", 64, 1): KernelConfig(0, 128, 4, 7),
    (90, "decode", 128, 1): KernelConfig(0, 128, 4, 5),
    (90, "decode", 256, 1): KernelConfig(0, 64, 4, 5),
    (90, "decode", 64, 4): KernelConfig(0, 32, 4, 5),
    (90, "decode", 128, 4): KernelConfig(0, 32, 4, 3),
    (90, "decode", 256, 4): KernelConfig(0, 16, 4, 5),
    (90, "prefill", 64, 2): KernelConfig(128, 128, 8, 3),
    (90, "prefill", 128, 2): KernelConfig(128, 128, 8, 2),
    (90, "prefill", 256, 2): KernelConfig(128, 64, 8, 2),
    (90, "prefill", 64, 1): KernelConfig(128, 128, 8, 3),
    (90, "prefill", 128, 1): KernelConfig(128, 64, 8, 3),
    (90, "prefill", 256, 1): KernelConfig(128, 32, 8, 3),
    (90, "prefill", 64, 4): KernelConfig(32, 32, 4, 1),
    (90, "prefill", 128, 4): KernelConfig(32, 16, 4, 1),
    (90, "prefill", 256, 4): KernelConfig(16, 16, 4, 1),
}

INTERPRETED = {"decode": KernelConfig(0, 256, 1, 1), "prefill": KernelConfig(256, 256, 1, 1)}
"""The interpreter takes as long for a large tile as for a small one."""


def shared_memory(capability: tuple[int, int]) -> int:
    """Most bytes of shared memory per program. An unknown device is taken for the newest known one before it."""
    return SHARED_MEMORY[max((known for known in SHARED_MEMORY if known <= capability), default=(8, 6))]


def lookup(problem: Problem, capability: tuple[int, int]) -> KernelConfig:
    """The shipped sizes for ``problem``, made to fit the device."""
    generation = 90 if capability >= (9, 0) else 80
    columns = next(size for size in (64, 128, 256) if head_pad(problem.head_size) <= size)
    # float32 is multiplied without tensor cores, whatever the cache holds
    item = 4 if problem.dtype == "float32" else ITEM_SIZES[problem.kv_dtype]
    return fit(problem, TABLE[generation, problem.kernel, columns, item], shared_memory(capability))
