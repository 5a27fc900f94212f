"""How much of the device's memory bandwidth decode attention reaches, and how fast prefill computes; shipped sizes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu_checks.report import Check
from pegboard_attn_triton.tuning.config import Problem
from pegboard_attn_triton.tuning.search import Bench, Load, seconds_of
from pegboard_attn_triton.tuning.table import lookup

COPY_BYTES = 2 << 30
SHAPES = {"32/8x128": (4, 128, 8), "32/32x128": (1, 128, 32), "9/3x64": (3, 64, 3)}
"""Query heads per key head, head size, key heads."""
LEAST_SHARE = 0.3
"""Of the copy bandwidth, for decode steps that read at least ``ENOUGH_BYTES``: below it something is wrong, not slow."""
ENOUGH_BYTES = 256 << 20


def run(device: torch.device) -> Iterator[Check]:
    bandwidth = _copy_bandwidth(device)
    yield Check(
        "copy within the device", bandwidth > 0, f"{bandwidth / 1e9:.0f} GB/s read and written", {"bytes_per_s": bandwidth}
    )
    for shape in SHAPES:
        for types in (("bfloat16", "bfloat16"), ("bfloat16", "int8")):
            for batch, context in ((1, 8192), (32, 4096), (128, 2048)):
                yield _decode(shape, types, Load(batch, context), bandwidth, device)
    for context, chunk in ((2048, 2048), (8192, 2048)):
        yield _prefill("32/8x128", Load(2, context, chunk), device)


def _copy_bandwidth(device: torch.device) -> float:
    source = torch.empty(COPY_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds_of(lambda: target.copy_(source), device)


def _decode(shape: str, types: tuple[str, str], load: Load, bandwidth: float, device: torch.device) -> Check:
    group, size, kv_heads = SHAPES[shape]
    problem = Problem("decode", size, group, *types, 16)
    bench = Bench(problem, kv_heads, load, device)
    seconds = bench(lookup(problem, torch.cuda.get_device_capability(device)))
    read = 2 * load.batch * load.context * kv_heads * size * bench.cache.itemsize
    share = read / seconds / bandwidth
    passed = share >= LEAST_SHARE or read < ENOUGH_BYTES
    name = f"decode {shape} {types[1]} batch {load.batch} context {load.context}"
    detail = f"{seconds * 1e6:7.1f} us, {read / seconds / 1e9:6.0f} GB/s, {share:4.0%} of the copy"
    return Check(name, passed, detail, {"seconds": seconds, "bytes": read, "share": share})


def _prefill(shape: str, load: Load, device: torch.device) -> Check:
    group, size, kv_heads = SHAPES[shape]
    problem = Problem("prefill", size, group, "bfloat16", "bfloat16", 16)
    seconds = Bench(problem, kv_heads, load, device)(lookup(problem, torch.cuda.get_device_capability(device)))
    pairs = load.batch * load.chunk * (load.context - load.chunk + (load.chunk + 1) / 2)
    rate = 4 * pairs * size * kv_heads * group / seconds
    name = f"prefill {shape} {load.batch} x {load.chunk} new of {load.context}"
    return Check(name, rate > 0, f"{seconds * 1e6:7.1f} us, {rate / 1e12:.0f} TFLOP/s", {"seconds": seconds, "flops": rate})
