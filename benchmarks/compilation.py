"""What torch.compile is worth on this machine: tokens per second of the same engine with and without it.

    python benchmarks/compilation.py [--threads 2] [--dtype bfloat16] [--reps 3]

SmolLM2, greedy. Both engines live in this process and take turns; the better of ``--reps`` repetitions counts. Prints a table
and one JSON line. The first run compiles, which takes a minute or more; ``ready_s`` says how long each engine took to start.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack

from workloads import Job, make_jobs

from pegboard import LLM, SamplingParams

WORKLOADS = {
    "decode, 1 request": (1, 16, 48),
    "decode, 8 requests": (8, 16, 48),
    "prefill, 4 x 512 tokens": (4, 512, 1),
}
"""Requests, tokens of each prompt, tokens of each answer."""


def jobs_of(requests: int, prompt: int, tokens: int, turn: int) -> list[Job]:
    """No prompt is met twice, so that nothing is cached."""
    found = make_jobs("W3", seed=100 * turn + requests)
    return [Job(found[i].prompt[:prompt], tokens) for i in range(requests)]


def rate(llm: LLM, jobs: list[Job]) -> float:
    """Tokens per second: those of the prompts where one is generated, else those that are generated."""
    params = [SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True) for job in jobs]
    begin = time.perf_counter()
    llm.generate([job.prompt for job in jobs], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return sum(len(job.prompt) if job.max_tokens == 1 else job.max_tokens for job in jobs) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--reps", type=int, default=3)
    options = parser.parse_args()
    with ExitStack() as stack:
        engines, ready = {}, {}
        for name, compiled in (("eager", False), ("compiled", True)):
            begin = time.perf_counter()
            engines[name] = stack.enter_context(
                LLM(
                    "smollm2",
                    dtype=options.dtype,
                    max_model_len=1024,
                    executor={"num_threads": options.threads},
                    kv_cache={"num_blocks": 400},
                    compilation={"torch_compile": compiled},
                )
            )
            ready[name] = round(time.perf_counter() - begin, 1)
        found = {workload: dict.fromkeys(engines, 0.0) for workload in WORKLOADS}
        for turn in range(options.reps):
            for workload, sizes in WORKLOADS.items():
                for name, llm in engines.items():
                    found[workload][name] = max(found[workload][name], rate(llm, jobs_of(*sizes, turn)))
    print(f"{'tokens/s':26s} {'eager':>10s} {'compiled':>10s} {'ratio':>6s}")
    for workload, rates in found.items():
        print(f"{workload:26s} {rates['eager']:10.1f} {rates['compiled']:10.1f} {rates['compiled'] / rates['eager']:6.2f}")
    print(json.dumps({"ready_s": ready, "tokens_per_s": found, "threads": options.threads, "dtype": options.dtype}))


if __name__ == "__main__":
    main()
