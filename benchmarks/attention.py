"""Attention over the paged cache, per layer, beside the naive path: gather by block table, then SDPA with grouped heads.

Run: ``python benchmarks/attention.py [--threads 2] [--dtype bfloat16] [--only NAME]``. One JSON line per shape, then a table.
Geometry is SmolLM2-135M's (9 heads, 3 key heads, head size 64, block size 16, 30 layers); every layer has a cache of its own, so
that no layer finds its keys in the processor's cache. ``ratio`` is naive time / backend time; ``plan_us`` is once per step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from pegboard.contracts.attention import AttentionLayer, AttentionQuery, CommonAttentionMetadata
from pegboard.plugins import PluginHost

HEADS, KV_HEADS, HEAD_SIZE, BLOCK, LAYERS = 9, 3, 64, 16, 30


@dataclass(frozen=True)
class Case:
    """Rows as (tokens in the cache after the step, new tokens); ``shared`` leading tokens are the same blocks for all rows."""

    name: str
    rows: list[tuple[int, int]]
    shared: int = 0


def cases() -> list[Case]:
    """The shapes that serving meets."""
    mixed = np.random.default_rng(0).integers(64, 385, 32).tolist()
    decode = [Case(f"decode B={b} ctx={ctx}", [(ctx, 1)] * b) for b in (1, 8, 32) for ctx in (128, 256, 1024)]
    return [
        *decode,
        Case("decode B=32 ctx=64..384", [(n, 1) for n in mixed]),
        Case("prefill 1x512", [(512, 512)]),
        Case("prefill 4x512", [(512, 512)] * 4),
        Case("prefill 16 prompts of 20..60", [(20 + 5 * (i % 9), 20 + 5 * (i % 9)) for i in range(16)]),
        Case("chunk of 512 after 512", [(1024, 512)]),
        Case("32x16 new, 512 cached", [(528, 16)] * 32),
        Case("32x16 new, 512 shared", [(528, 16)] * 32, shared=512),
        Case("decode B=32 ctx=560, 512 shared", [(560, 1)] * 32, shared=512),
        Case("512 prefill + 16 decode", [(512, 512)] + [(n, 1) for n in mixed[:16]]),
    ]


class Bench:
    """Caches and arguments of one case."""

    def __init__(self, case: Case, backend: str, dtype: torch.dtype, layers: int) -> None:
        name = str(dtype).removeprefix("torch.")
        query = AttentionQuery("cpu", name, name, HEADS, KV_HEADS, HEAD_SIZE, BLOCK)
        provider = PluginHost.load().get("attention", backend)
        self.backend = provider.load()(query=query)
        self.layer = AttentionLayer("layer", HEADS, KV_HEADS, HEAD_SIZE, HEAD_SIZE**-0.5)
        self.case, self.layers = case, layers
        own = [-(-length // BLOCK) - case.shared // BLOCK for length, _ in case.rows]
        blocks = torch.randperm(sum(own) + case.shared // BLOCK + 8).tolist()
        shape = self.backend.kv_cache_shape(len(blocks), BLOCK, KV_HEADS, HEAD_SIZE)
        self.caches = [torch.randn(shape).to(dtype) for _ in range(layers)]
        # The naive path has the plain layout: keys and values apart, [blocks, block, heads, size].
        plain = (len(blocks), BLOCK, KV_HEADS, HEAD_SIZE)
        self.plain = [(torch.randn(plain).to(dtype), torch.randn(plain).to(dtype)) for _ in range(layers)]
        prefix = [blocks.pop() for _ in range(case.shared // BLOCK)]
        tables = [prefix + [blocks.pop() for _ in range(count)] for count in own]
        width = max(map(len, tables))
        new = [count for _, count in case.rows]
        slots = [t[p // BLOCK] * BLOCK + p % BLOCK for t, (n, c) in zip(tables, case.rows, strict=True) for p in range(n - c, n)]
        self.common = CommonAttentionMetadata(
            query_start_loc=np.cumsum([0, *new]).astype(np.int32),
            seq_lens=np.array([length for length, _ in case.rows], np.int32),
            block_table=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            block_size=BLOCK,
            num_rows=len(tables),
            num_tokens=sum(new),
        )
        fused = torch.randn(sum(new), HEADS + 2 * KV_HEADS, HEAD_SIZE).to(dtype)
        self.qkv = fused.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        self.out = torch.empty(sum(new), HEADS, HEAD_SIZE, dtype=dtype)

    def plan(self, _: int) -> None:
        self.backend.build_metadata(self.common)

    def ours(self) -> Callable[[int], None]:
        metadata = self.backend.build_metadata(self.common)

        def layer(index: int) -> None:
            self.backend.forward(self.layer, *self.qkv, self.caches[index], metadata, self.out)

        return layer

    def naive(self) -> Callable[[int], None]:
        """Per set of rows with equal lengths: write, gather, ``scaled_dot_product_attention(enable_gqa=True)``."""
        common, (query, key, value) = self.common, self.qkv
        start = common.query_start_loc.tolist()
        sets: dict[tuple[int, int], list[int]] = {}
        decode = [i for i, (_, count) in enumerate(self.case.rows) if count == 1]
        if decode:
            sets[max(self.case.rows[i][0] for i in decode), 1] = decode
        for i, (length, count) in enumerate(self.case.rows):
            if count > 1:
                sets.setdefault((length, count), []).append(i)
        plans = []
        for (length, count), rows in sets.items():
            table = common.block_table[rows, : -(-length // BLOCK)].long()
            lens = torch.tensor([self.case.rows[i][0] for i in rows])
            at = lens[:, None] - count + torch.arange(count)
            mask = torch.arange(table.shape[1] * BLOCK) <= at[:, :, None]
            tokens = torch.tensor([start[i] + j for i in rows for j in range(count)])
            plans.append((table, mask.unsqueeze(1), tokens, count))
        block, offset = common.slot_mapping // BLOCK, common.slot_mapping % BLOCK

        def layer(index: int) -> None:
            keys, values = self.plain[index]
            keys[block, offset] = key
            values[block, offset] = value
            for table, mask, tokens, count in plans:
                k = keys[table].flatten(1, 2).transpose(1, 2)
                v = values[table].flatten(1, 2).transpose(1, 2)
                q = query[tokens].view(len(table), count, HEADS, HEAD_SIZE).transpose(1, 2)
                attended = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
                self.out[tokens] = attended.transpose(1, 2).flatten(0, 1)

        return layer


def best(paths: list[Callable[[int], None]], layers: int, seconds: float) -> list[float]:
    """Microseconds per layer of each path: the mean over the layers of a layer's least time. Paths take turns.

    Layers are timed one by one, because a call that is shorter than a time slice has a least time that neighbours on
    the machine do not move.
    """
    least = np.full((len(paths), layers), np.inf)
    end = time.perf_counter() + seconds * len(paths)
    turns = 0
    while turns < 3 or time.perf_counter() < end:
        turns += 1
        for path, run in enumerate(paths):
            for index in range(layers):
                begin = time.perf_counter()
                run(index)
                least[path, index] = min(least[path, index], time.perf_counter() - begin)
    return (least.mean(axis=1) * 1e6).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--seconds", type=float, default=1.5, help="per shape and path")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--no-naive", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    table = []
    with torch.inference_mode():
        for case in cases():
            if args.only not in case.name:
                continue
            bench = Bench(case, args.backend, getattr(torch, args.dtype), args.layers)
            paths = [bench.ours()] if args.no_naive else [bench.ours(), bench.naive()]
            ours, naive = (*best(paths, args.layers, args.seconds), float("nan"))[:2]
            row = {
                "shape": case.name,
                "us_per_layer": round(ours, 1),
                "naive_us": round(naive, 1),
                "ratio": round(naive / ours, 2),
                "plan_us": round(best([bench.plan], 1, 0.1)[0], 1),
                "dtype": args.dtype,
                "threads": args.threads,
            }
            print(json.dumps(row), flush=True)
            table.append(row)
    print(f"\n{'shape':34s} {'us/layer':>9s} {'naive':>9s} {'ratio':>6s} {'plan us':>8s}")
    for row in table:
        print(f"{row['shape']:34s} {row['us_per_layer']:9.1f} {row['naive_us']:9.1f} {row['ratio']:6.2f} {row['plan_us']:8.1f}")


if __name__ == "__main__":
    main()
