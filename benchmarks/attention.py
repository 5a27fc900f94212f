"""Attention over the paged cache, per layer: plain ("before"), Pegboard's backend ("after"), and vLLM's for CPUs.

    python benchmarks/attention.py [--peer-python PATH] [--threads 2] [--dtype bfloat16 float32] [--shapes grid serving]

"Before" gathers keys and values by block table and calls ``scaled_dot_product_attention(enable_gqa=True)`` on rows of equal
length at once. All paths store the step's keys and values too. Every layer has a cache of its own. Paths take turns, round by
round, with a pause where the process changes (idle threads of the other one still spin); "best" is the mean over the layers of
each one's least time in all rounds, "median" that of the rounds. Prints a line per shape, a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attention_shapes import GEOMETRIES, Case, grid, least_times, serving, slots, tables

from pegboard.contracts.attention import AttentionLayer, AttentionQuery, CommonAttentionMetadata
from pegboard.plugins import PluginHost

BLOCK = 16
PAUSE = 0.25
"""Seconds in which the threads of another process fall asleep."""
ADAPTER = Path(__file__).parent / "adapters" / "vllm_attention.py"

Path_ = Callable[[float], list[float]]
"""Times a path for so many seconds: microseconds per layer."""


class Bench:
    """Caches and arguments of one case."""

    def __init__(self, case: Case, backend: str, kv_dtype: str) -> None:
        """``kv_dtype``: what the backend's cache holds, "auto" for the case's type."""
        heads, kv_heads, size = case.heads
        dtype = getattr(torch, case.dtype)
        stored = case.dtype if kv_dtype == "auto" else kv_dtype
        query = AttentionQuery("cpu", case.dtype, stored, heads, kv_heads, size, BLOCK)
        self.backend = PluginHost.load().get("attention", backend).load()(query=query)
        self.layer = AttentionLayer("layer", heads, kv_heads, size, size**-0.5)
        self.case = case
        table, count = tables(case, BLOCK)
        shape = self.backend.kv_cache_shape(count, BLOCK, kv_heads, size)
        self.caches = [cache(shape, getattr(torch, stored)) for _ in range(case.layers)]
        # The plain path has the plain layout: keys and values apart, [blocks, block, heads, size].
        plain = (count, BLOCK, kv_heads, size)
        self.plain = [(cache(plain, dtype), cache(plain, dtype)) for _ in range(case.layers)]
        width = max(map(len, table))
        new = [count for _, count in case.rows]
        self.common = CommonAttentionMetadata(
            query_start_loc=np.cumsum([0, *new]).astype(np.int32),
            seq_lens=np.array([length for length, _ in case.rows], np.int32),
            block_table=torch.tensor([row + [0] * (width - len(row)) for row in table], dtype=torch.int32),
            slot_mapping=torch.tensor(slots(case, table, BLOCK)),
            block_size=BLOCK,
            num_rows=len(table),
            num_tokens=sum(new),
        )
        fused = torch.randn(sum(new), heads + 2 * kv_heads, size).to(dtype)
        self.qkv = fused.split([heads, kv_heads, kv_heads], dim=1)
        self.out = torch.empty(sum(new), heads, size, dtype=dtype)

    def plan(self, _: int) -> None:
        self.backend.build_metadata(self.common)

    def after(self) -> Path_:
        metadata = self.backend.build_metadata(self.common)

        def layer(index: int) -> None:
            self.backend.forward(self.layer, *self.qkv, self.caches[index], metadata, self.out)

        return lambda seconds: least_times(layer, self.case.layers, seconds)

    def before(self) -> Path_:
        """Per set of rows with equal lengths: write, gather, ``scaled_dot_product_attention(enable_gqa=True)``."""
        common, (query, key, value) = self.common, self.qkv
        heads, _, size = self.case.heads
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
                q = query[tokens].view(len(table), count, heads, size).transpose(1, 2)
                attended = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
                self.out[tokens] = attended.transpose(1, 2).flatten(0, 1)

        return lambda seconds: least_times(layer, self.case.layers, seconds)


def cache(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The same numbers in every block: only where they lie matters."""
    made = torch.empty(shape, dtype=dtype)
    made[:] = torch.randn(shape[1:]).to(dtype)
    return made


class Peer:
    """vLLM's attention in a process of its own."""

    def __init__(self, python: str, threads: int) -> None:
        preload = [next(iter(sorted(Path(root).glob(name))), None) for root, name in preloads(python)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "LD_PRELOAD": ":".join(str(p) for p in preload if p)}
        command = [python, str(ADAPTER)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, **order: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(
                f"{' '.join(map(str, self._process.args))} ended with {self._process.wait()}; run it by hand to see why"
            )
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def preloads(python: str) -> list[tuple[str, str]]:
    """What vLLM's documentation tells to preload on a CPU: folder and name."""
    return [("/usr/lib/x86_64-linux-gnu", "libtcmalloc_minimal.so.4"), (str(Path(python).parents[1] / "lib"), "libiomp5.so")]


def measure(case: Case, args: argparse.Namespace, peer: Peer | None) -> dict[str, Any]:
    """One case's row of the table."""
    bench = Bench(case, args.backend, args.kv_dtype)
    paths: dict[str, Path_] = {"after": bench.after()}
    if not args.no_before:
        paths = {"before": bench.before(), **paths}
    plan_us = {"after": least_times(bench.plan, 1, 0.05)[0]}
    if peer is not None:
        told = peer.ask(case=case.to_json())
        tolerance = 1e-4 if case.dtype == "float32" else 3e-2
        if not told["error"] < tolerance:
            raise SystemExit(f"the peer's result for {case.name} is off by {told['error']}: it is called wrongly")
        paths["peer"] = lambda seconds: peer.ask(seconds=seconds)
        plan_us["peer"] = told["plan_us"]
    rounds: dict[str, list[list[float]]] = {path: [] for path in paths}
    for _ in range(args.rounds):
        for path, run in paths.items():
            if peer is not None and path != "after":
                time.sleep(PAUSE)
            rounds[path].append(run(args.seconds))
    best = {path: statistics.fmean(map(min, zip(*times, strict=True))) for path, times in rounds.items()}
    median = {path: statistics.median(map(statistics.fmean, times)) for path, times in rounds.items()}
    return {
        "shape": case.name,
        "geometry": case.geometry,
        "dtype": case.dtype,
        "kv_dtype": args.kv_dtype,
        "layers": case.layers,
        "best_us": {path: round(value, 1) for path, value in best.items()},
        "median_us": {path: round(value, 1) for path, value in median.items()},
        "plan_us": {path: round(value, 1) for path, value in plan_us.items()},
        "before_to_after": round(best["before"] / best["after"], 2) if "before" in best else None,
        "peer_to_after": round(best["peer"] / best["after"], 2) if "peer" in best else None,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    names = ("before", "after", "peer")
    print(
        f"\n{'microseconds per layer, best (median)':46s}"
        + "".join(f"{name:>20s}" for name in names)
        + f"{'before/after':>14s}{'peer/after':>12s}"
    )
    for row in rows:
        cells = [f"{row['best_us'][n]:.0f} ({row['median_us'][n]:.0f})" if n in row["best_us"] else "-" for n in names]
        ratios = [row["before_to_after"] or "-", row["peer_to_after"] or "-"]
        label = f"{row['shape']}, {row['geometry']}, {row['dtype']}"
        print(f"{label:46s}" + "".join(f"{cell:>20s}" for cell in cells) + f"{ratios[0]!s:>14s}{ratios[1]!s:>12s}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="a Python that has vLLM's CPU build; without it the peer is left out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--geometry", nargs="+", default=list(GEOMETRIES), choices=list(GEOMETRIES))
    parser.add_argument("--shapes", nargs="+", default=["grid"], choices=["grid", "serving"])
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--kv-dtype", default="auto", help="of the backend's cache: auto, int8, float8_e4m3fn, …")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="per shape, path and round")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--no-before", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shapes = [shape for name in args.shapes for shape in {"grid": grid, "serving": serving}[name]()]
    peer = Peer(args.peer_python, args.threads) if args.peer_python else None
    rows = []
    with torch.inference_mode():
        for dtype in args.dtype:
            for geometry in args.geometry:
                for name, lengths, shared in shapes:
                    if args.only in name:
                        rows.append(measure(Case(name, lengths, geometry, dtype, shared), args, peer))
                        print(json.dumps(rows[-1]), flush=True)
    if peer is not None:
        peer.close()
    print_table(rows)
    print(json.dumps({"benchmark": "attention", "threads": args.threads, "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
