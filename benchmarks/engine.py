"""Where a decode step's time goes: the share spent outside the model's forward and the sampler.

    python benchmarks/engine.py [--running 32] [--steps 100] [--dtype bfloat16]

Starts the engine on SmolLM2, brings ``--running`` requests into decode, then times whole ``LLMEngine.step()`` calls
(scheduling, executor, deltas, inputs, outputs, detokenization) against the forward and sampler times that the worker
records inside them. Prints one JSON line; ``outside_share`` is the figure to keep at or below 0.12.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from workloads import Job, make_jobs

from pegboard import LLMEngine, SamplingParams


def decode_jobs(count: int, prompt_len: int, tokens: int) -> list[Job]:
    prompts = [job.prompt for job in make_jobs("W3", seed=7)]
    return [Job(prompts[i % len(prompts)][i : i + prompt_len], tokens) for i in range(count)]


def measure(engine: LLMEngine, steps: int) -> dict[str, float]:
    engine.collective_rpc("record_timings", (True,))
    walls = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        walls.append(time.perf_counter() - began)
    (inside,) = engine.collective_rpc("record_timings", (False,))
    step = sum(walls) / steps
    forward, sampler = inside["forward"] / steps, inside["sample"] / steps
    return {
        "step_ms": round(1e3 * step, 3),
        "step_ms_p50": round(1e3 * statistics.median(walls), 3),
        "forward_ms": round(1e3 * forward, 3),
        "sampler_ms": round(1e3 * sampler, 3),
        "outside_ms": round(1e3 * (step - forward - sampler), 3),
        "outside_share": round(1 - (forward + sampler) / step, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()

    with LLMEngine(model="smollm2", dtype=args.dtype, max_num_seqs=args.running) as engine:
        warm = 10
        for i, job in enumerate(decode_jobs(args.running, args.prompt_len, args.steps + warm + 50)):
            params = SamplingParams(temperature=args.temperature, max_tokens=job.max_tokens, ignore_eos=True)
            engine.add_request(str(i), job.prompt, params)
        produced = dict.fromkeys((str(i) for i in range(args.running)), 0)
        while min(produced.values()) < warm:
            for output in engine.step():
                produced[output.request_id] = len(output.outputs[0].token_ids)
        result = measure(engine, args.steps)
    print(f"{args.running} running: {result}", file=sys.stderr)
    print(json.dumps({"benchmark": "engine", "running": args.running, "dtype": args.dtype, "steps": args.steps, **result}))


if __name__ == "__main__":
    main()
