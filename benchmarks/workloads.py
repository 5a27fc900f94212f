"""Workloads W1–W5 for whole engines, and the loop by which an adapter serves them. Standard library only.

An adapter is one file in ``adapters/``. It runs in any Python that has its engine, so that peers with conflicting
dependencies can be measured in one run: ``peers.py`` starts each as a process and sends it one command per line.
Greedy, end-of-sequence ignored, random token ids, everything submitted at once.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

FIRST_ID, LAST_ID = 100, 48_000


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    max_tokens: int


@dataclass
class Result:
    """``times``: ``time.perf_counter()`` at which each token was seen, if the engine tells."""

    token_ids: list[int]
    times: list[float] = field(default_factory=list)


class Adapter(Protocol):
    name: str

    def version(self) -> str: ...

    def run(self, jobs: list[Job]) -> list[Result]: ...


def _shape_w1() -> list[tuple[int, int]]:
    rng = random.Random(0)
    return [(rng.randint(64, 256), rng.randint(32, 128)) for _ in range(32)]


SHAPES: dict[str, tuple[str, int, Callable[[], list[tuple[int, int]]]]] = {
    # name: (what it stands for, shared prefix length, [(own prompt length, output length)])
    "W1": ("offline batch: 32 mixed requests", 0, _shape_w1),
    "W2": ("decode: 8 requests, 256 tokens each", 0, lambda: [(32, 256)] * 8),
    "W3": ("prefill: 16 prompts of 512 tokens, 8 tokens each", 0, lambda: [(512, 8)] * 16),
    "W4": ("shared prefix: 32 requests with 512 tokens in common", 512, lambda: [(16, 32)] * 32),
    "W5": ("one stream: 128 tokens", 0, lambda: [(32, 128)]),
}


def make_jobs(workload: str, seed: int) -> list[Job]:
    """Lengths never change; token ids follow ``seed``, so that no repetition finds the previous one's prefixes cached."""
    _, prefix_len, shape = SHAPES[workload]
    rng = random.Random(f"{workload}/{seed}")

    def draw(n: int) -> list[int]:
        return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(n)]

    prefix = draw(prefix_len)
    return [Job(prefix + draw(prompt), output) for prompt, output in shape()]


def score(workload: str, jobs: list[Job], results: list[Result], start: float, wall: float) -> dict[str, object]:
    """Generated tokens per second; for W3, whose work is the prompt, prompt and generated tokens per second."""
    generated = sum(len(r.token_ids) for r in results)
    prompts = sum(len(j.prompt) for j in jobs)
    counted = generated + prompts if workload == "W3" else generated
    gaps = [b - a for r in results for a, b in zip(r.times, r.times[1:], strict=False)]
    firsts = [r.times[0] - start for r in results if r.times]
    return {
        "tokens_per_s": round(counted / wall, 2),
        "wall_s": round(wall, 4),
        "ttft_ms": round(1e3 * statistics.median(firsts), 2) if firsts else None,
        "itl_ms": round(1e3 * statistics.median(gaps), 2) if gaps else None,
    }


def serve(make_adapter: Callable[[], Adapter]) -> None:
    """Answer commands from stdin, one JSON object per line, until it closes: {"workload", "seed", "warmup"}."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines print; only replies go to the original stdout
    began = time.perf_counter()
    adapter = make_adapter()
    ready = time.perf_counter() - began
    print(json.dumps({"engine": adapter.name, "version": adapter.version(), "ready_s": round(ready, 2)}), file=replies)
    for line in sys.stdin:
        command = json.loads(line)
        jobs = make_jobs(command["workload"], command["seed"])
        if command.get("warmup"):
            jobs = [Job(j.prompt, min(j.max_tokens, 4)) for j in jobs]
        start = time.perf_counter()
        results = adapter.run(jobs)
        wall = time.perf_counter() - start
        wrong = [(len(r.token_ids), j.max_tokens) for r, j in zip(results, jobs, strict=True) if len(r.token_ids) != j.max_tokens]
        if wrong:
            print(json.dumps({"error": f"wrong output lengths (got, wanted): {wrong[:3]}"}), file=replies)
            continue
        reply = score(command["workload"], jobs, results, start, wall)
        print(json.dumps(reply | {"peak_rss_mb": _peak_rss_mb()}), file=replies)
    replies.flush()
    os._exit(0)  # some engines leave threads behind that would keep the process


def _peak_rss_mb() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) // 1024
