"""Try sizes on a device and keep the quickest."""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from pegboard.contracts.attention import AttentionLayer, AttentionQuery, CommonAttentionMetadata
from pegboard_attn_triton.backend import TritonAttentionBackend
from pegboard_attn_triton.tuning.config import KernelConfig, Problem, group_pad, shared_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Load:
    """What the kernel is timed on: ``batch`` rows of ``context`` tokens; prefill computes the last ``chunk`` of them."""

    batch: int = 32
    context: int = 4096
    chunk: int = 512


def candidates(problem: Problem, limit: int) -> list[KernelConfig]:
    """Sizes worth trying that ought to fit ``limit`` bytes of shared memory."""
    rows = (0,) if problem.kernel == "decode" else tuple(max(m, group_pad(problem.group)) for m in (16, 32, 64, 128))
    stages = (1, 3, 5, 7) if problem.kernel == "decode" else (1, 2, 3, 5)
    found = [KernelConfig(*sizes) for sizes in itertools.product(dict.fromkeys(rows), (16, 32, 64, 128), (2, 4, 8), stages)]
    return [config for config in found if shared_bytes(problem, config) <= limit]


def tune(problem: Problem, configs: Iterable[KernelConfig], measure: Callable[[KernelConfig], float]) -> KernelConfig:
    """The config of the least ``measure``. One that fails (registers, shared memory) is passed over; raises ``RuntimeError`` when
    all do."""
    timed: dict[KernelConfig, float] = {}
    for config in configs:
        try:
            timed[config] = measure(config)
        except Exception as error:
            log.info("%s with %s: %s: %s", problem.kernel, config, type(error).__name__, error)
    if not timed:
        raise RuntimeError(f"no sizes work for {problem}; see the log for the reasons")
    best = min(timed, key=timed.__getitem__)
    log.info("%s: %s, %.1f us", problem.kernel, best, timed[best] * 1e6)
    return best


class Bench:
    """Times attention of one layer on a step of a problem's kind. Everything lies in one cache of shuffled blocks."""

    def __init__(self, problem: Problem, num_kv_heads: int, load: Load, device: torch.device, seed: int = 0) -> None:
        heads, size = num_kv_heads * problem.group, problem.head_size
        dtype, kv_dtype = getattr(torch, problem.dtype), getattr(torch, problem.kv_dtype)
        self._device, self._problem = device, problem
        self.backend = TritonAttentionBackend(
            AttentionQuery(device.type, problem.dtype, problem.kv_dtype, heads, num_kv_heads, size, problem.block_size), device
        )
        self.layer = AttentionLayer("layer", heads, num_kv_heads, size, size**-0.5)
        self.common = step_of(load, 1 if problem.kernel == "decode" else load.chunk, problem.block_size, device, seed)
        torch.manual_seed(seed)
        shape = self.backend.kv_cache_shape(self.common.block_table.numel(), problem.block_size, num_kv_heads, size)
        self.cache = torch.randn(shape, device=device).mul_(2.0).to(kv_dtype)
        self.query = torch.randn(self.common.num_tokens, heads, size, device=device).to(dtype)
        self.out = torch.empty_like(self.query)

    def __call__(self, config: KernelConfig) -> float:
        """Seconds of one layer's attention."""
        if self._problem.kernel == "decode":
            self.backend.decode_config = config
        else:
            self.backend.prefill_config = config
        metadata = self.backend.build_metadata(self.common)
        return seconds_of(lambda: self.backend.attend(self.layer, self.query, self.cache, metadata, self.out), self._device)


def step_of(load: Load, new_tokens: int, block_size: int, device: torch.device, seed: int) -> CommonAttentionMetadata:
    """``load.batch`` rows of ``load.context`` tokens, the last ``new_tokens`` of which are new; no two share a block."""
    blocks = -(-load.context // block_size)
    table = np.random.default_rng(seed).permutation(load.batch * blocks).astype(np.int32).reshape(load.batch, blocks)
    new_tokens = min(new_tokens, load.context)
    at = np.arange(load.context - new_tokens, load.context)
    slots = table[:, at // block_size].astype(np.int64) * block_size + at % block_size
    return CommonAttentionMetadata(
        query_start_loc=(np.arange(load.batch + 1) * new_tokens).astype(np.int32),
        seq_lens=np.full(load.batch, load.context, np.int32),
        block_table=torch.from_numpy(table).to(device),
        slot_mapping=torch.from_numpy(slots.ravel()).to(device),
        block_size=block_size,
        num_rows=load.batch,
        num_tokens=load.batch * new_tokens,
    )


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median time of ``run`` after a warm-up, by events on a CUDA device; the device's cache is flushed in between."""
    run()
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    flush = torch.empty(64 << 20, dtype=torch.int32, device=device)
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
