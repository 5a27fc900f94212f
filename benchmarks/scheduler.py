"""Time of one decode step in the default scheduler: ``schedule`` plus ``update_from_output``, without any model.

    python benchmarks/scheduler.py [--sizes 256 1024] [--steps 200] [--depth 1]

Prints one JSON line per number of running requests. Prompts of 128 tokens have been prefilled; prefix caching is on, blocks
hold 16 tokens, so in each step a sixteenth of the requests fills a block (hash, publish) and takes another.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections import deque

from pegboard.config import EngineConfig, SchedulerConfig
from pegboard.testing.driver import make_request
from pegboard.testing.fake_composition import FakeComposition
from pegboard.testing.fakes import fake_kv_config
from pegboard.wire import ModelRunnerOutput, SchedulerOutput
from pegboard_plugins.kv.prefix import PrefixAllocator
from pegboard_plugins.scheduling.admission import DefaultAdmission
from pegboard_plugins.scheduling.chunking import DefaultChunking
from pegboard_plugins.scheduling.preemption import RecomputePreemption
from pegboard_plugins.scheduling.queues import FCFSQueue
from pegboard_plugins.scheduling.scheduler import DefaultScheduler

PROMPT_LEN, BLOCK_SIZE = 128, 16


def make_scheduler(num_requests: int, num_steps: int) -> DefaultScheduler:
    limits = SchedulerConfig(max_num_seqs=num_requests, max_num_batched_tokens=max(8192, num_requests))
    config = EngineConfig(model="none", scheduler=limits)
    parts = {
        "request_queue": FCFSQueue,
        "admission_policy": DefaultAdmission,
        "chunk_policy": DefaultChunking,
        "preemption_policy": RecomputePreemption,
        "kv_allocator": PrefixAllocator,
    }
    each = (PROMPT_LEN + num_steps) // BLOCK_SIZE + 2
    scheduler = DefaultScheduler(config, FakeComposition(config, parts), fake_kv_config(num_requests * each * 2, BLOCK_SIZE))
    rng = random.Random(0)
    for i in range(num_requests):
        prompt = [rng.randrange(30_000) for _ in range(PROMPT_LEN + i % BLOCK_SIZE)]
        scheduler.add_request(make_request(f"request-{i}", prompt, num_steps * 2, stop_token_ids=[2]))
    return scheduler


def null_output(plan: SchedulerOutput) -> ModelRunnerOutput:
    tokens = [[7] * num for num in plan.num_to_sample]
    return ModelRunnerOutput(step_id=plan.step_id, slots=list(plan.slots), sampled_token_ids=tokens)


def measure(num_requests: int, num_steps: int, depth: int) -> dict[str, object]:
    scheduler = make_scheduler(num_requests, num_steps + 50)
    while True:  # prefill until everybody decodes
        plan = scheduler.schedule()
        scheduler.update_from_output(plan, null_output(plan))
        if plan.total_num_scheduled_tokens == len(plan.slots) == num_requests:
            break
    in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
    planning: list[float] = []
    booking: list[float] = []
    gc.collect()
    gc.freeze()
    for step in range(num_steps + 20):
        start = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter() - start
        assert len(plan.slots) == num_requests
        in_flight.append((plan, null_output(plan)))
        if len(in_flight) < depth:
            continue
        plan, output = in_flight.popleft()
        start = time.perf_counter()
        messages = scheduler.update_from_output(plan, output)
        booked = time.perf_counter() - start
        assert len(messages) == num_requests
        if step >= 20:
            planning.append(planned * 1e3)
            booking.append(booked * 1e3)
    both = [p + b for p, b in zip(planning, booking, strict=True)]
    return {
        "benchmark": "scheduler",
        "running": num_requests,
        "depth": depth,
        "steps": len(both),
        "ms_per_step": round(statistics.median(both), 3),
        "ms_per_step_mean": round(statistics.fmean(both), 3),
        "schedule_ms": round(statistics.median(planning), 3),
        "update_ms": round(statistics.median(booking), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--depth", type=int, default=1, help="plans in flight")
    args = parser.parse_args()
    for size in args.sizes:
        print(json.dumps(measure(size, args.steps, args.depth)), flush=True)


if __name__ == "__main__":
    main()
