"""What a step's sampling costs: 32 rows of 49,152 float32 logits, under each option alone and under many together.

    python benchmarks/sampling.py [--rows 32] [--vocab 49152] [--threads 2] [--seconds 1] [--only NAME] [--decode-step]

Logits are drawn from Student's t distribution, whose heavy tail resembles a language model's; ``flat`` cases have a temperature
that leaves tens of thousands of tokens in the nucleus. Cases take turns, and each one's least time counts, so that ratios hold on
a machine with other work. ``ratio`` is to plain temperature sampling of the same rows. ``--decode-step`` also runs SmolLM2 (32
requests in decode, bfloat16), repeats the cases on its own logits, and gives ``step_share``: of the forward of one decode step.
Prints one JSON line per case, then a table.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pegboard import SamplingParams
from pegboard.contracts.sampler import SamplingBatch
from pegboard.testing.sampling_batches import batch_of
from pegboard_plugins.sampling.bad_words import BadWords
from pegboard_plugins.sampling.sampler import DefaultSampler

KNOWN_TOKENS = 500
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3}
WARM_STEPS = 10


@dataclass(frozen=True)
class Case:
    """``options`` of every row, and whether each has a grammar's mask or 50 bad words."""

    name: str
    options: dict[str, object]
    grammar: bool = False
    bad_words: bool = False


def cases(vocab: int) -> list[Case]:
    rng = np.random.default_rng(1)
    bias = dict(zip(rng.choice(vocab, 100, replace=False).tolist(), rng.uniform(-5, 5, 100).tolist(), strict=True))
    allowed = tuple(rng.choice(vocab, 1000, replace=False).tolist())
    return [
        Case("temperature", {}),
        Case("greedy", {"temperature": 0.0}),
        Case("top_k=50", {"top_k": 50}),
        Case("top_k=5000", {"top_k": 5000}),
        Case("top_p=0.9", {"top_p": 0.9}),
        Case("top_p=0.9 flat", {"top_p": 0.9, "temperature": 3.0}),
        Case("top_p=0.99 flat", {"top_p": 0.99, "temperature": 10.0}),
        Case("min_p=0.05", {"min_p": 0.05}),
        Case("min_p=0.05 flat", {"min_p": 0.05, "temperature": 10.0}),
        Case("penalties", PENALTIES),
        Case("greedy penalties", {"temperature": 0.0, **PENALTIES}),
        Case("logit_bias of 100", {"logit_bias": bias}),
        Case("allowed_token_ids of 1000", {"allowed_token_ids": allowed}),
        Case("50 bad words", {}, bad_words=True),
        Case("grammar", {}, grammar=True),
        Case("logprobs=5", {"logprobs": 5}),
        Case("top_k top_p penalties", {"temperature": 0.8, "top_k": 50, "top_p": 0.9, **PENALTIES}),
        Case(
            "all",
            {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "logit_bias": bias, **PENALTIES},
            grammar=True,
            bad_words=True,
        ),
    ]


def make_batch(case: Case, rows: int, vocab: int) -> SamplingBatch:
    """Half of the known tokens are prompt, half output; all differ."""
    rng = np.random.default_rng(2)
    known = [rng.choice(vocab, KNOWN_TOKENS, replace=False).tolist() for _ in range(rows)]
    half = KNOWN_TOKENS // 2
    words = [rng.integers(0, vocab, rng.integers(1, 4)).tolist() for _ in range(50)]
    masks = {row: rng.integers(0, 2**32, -(-vocab // 32), dtype=np.uint32) for row in range(rows)}
    return batch_of(
        [SamplingParams(seed=row, **case.options) for row in range(rows)],  # type: ignore[arg-type]
        prompts=[ids[:half] for ids in known],
        outputs=[ids[half:] for ids in known],
        bad_words={row: BadWords(words) for row in range(rows)} if case.bad_words else None,
        grammar_masks=masks if case.grammar else None,
        vocab_limit=vocab,
    )


def measure(logits: torch.Tensor, chosen: Sequence[Case], seconds: float) -> list[float]:
    """Least milliseconds of each case."""
    sampler, (rows, vocab) = DefaultSampler(), logits.shape
    batches = [make_batch(case, rows, vocab) for case in chosen]
    least = [float("inf")] * len(batches)
    working, turns, end = torch.empty_like(logits), 0, time.perf_counter() + seconds * len(batches)
    while turns < 5 or time.perf_counter() < end:
        turns += 1
        for i, batch in enumerate(batches):
            working.copy_(logits)  # a sampler may overwrite them
            batch.positions += 1
            began = time.perf_counter()
            sampler.sample(working, batch)
            least[i] = min(least[i], time.perf_counter() - began)
    return [1e3 * value for value in least]


def decode_step(rows: int, steps: int) -> tuple[float, torch.Tensor]:
    """Least milliseconds of the forward of a decode step of SmolLM2, and the logits [rows, V] float32 of the last one."""
    from engine import decode_jobs

    from pegboard import LLMEngine

    seen: list[torch.Tensor] = []
    original = DefaultSampler.sample

    def keeping(self: DefaultSampler, logits: torch.Tensor, batch: SamplingBatch) -> object:
        seen[:] = [logits[:, : batch.vocab_limit].float().clone()]
        return original(self, logits, batch)

    DefaultSampler.sample = keeping  # type: ignore[method-assign, assignment]
    try:
        with LLMEngine(model="smollm2", dtype="bfloat16", max_num_seqs=rows) as engine:
            for i, job in enumerate(decode_jobs(rows, 128, 2 * WARM_STEPS + steps)):
                params = SamplingParams(temperature=1.0, seed=i, max_tokens=job.max_tokens, ignore_eos=True)
                engine.add_request(str(i), job.prompt, params)
            for _ in range(WARM_STEPS + 2 * rows):  # until all are in decode
                if sum(len(out.outputs[0].token_ids) >= WARM_STEPS for out in engine.step()) == rows:
                    break
            engine.collective_rpc("record_timings", (True,))
            forwards = []
            for _ in range(steps):
                engine.step()
                (inside,) = engine.collective_rpc("record_timings", (True,))  # of this step: reading starts anew
                forwards.append(inside["forward"])
    finally:
        DefaultSampler.sample = original  # type: ignore[method-assign]
    return 1e3 * min(forwards), seen[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="per case")
    parser.add_argument("--only", default="", help="cases whose name contains this, and plain temperature")
    parser.add_argument("--decode-step", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rng = np.random.default_rng(0)
    sources = {"student-t": torch.from_numpy((1.5 * rng.standard_t(5, (args.rows, args.vocab))).astype(np.float32))}
    step_ms = None
    if args.decode_step:
        step_ms, sources["smollm2"] = decode_step(args.rows, steps=60)
    table = []
    for source, logits in sources.items():
        chosen = [case for case in cases(logits.shape[1]) if args.only in case.name or case.name == "temperature"]
        times = measure(logits, chosen, args.seconds)
        for case, ms in zip(chosen, times, strict=True):
            row = {
                "benchmark": "sampling",
                "logits": source,
                "case": case.name,
                "ms": round(ms, 3),
                "ratio": round(ms / times[0], 2),
                "rows": args.rows,
                "vocab": logits.shape[1],
                "threads": args.threads,
            }
            if step_ms is not None:
                row |= {"forward_ms": round(step_ms, 2), "step_share": round(ms / step_ms, 4)}
            print(json.dumps(row), flush=True)
            table.append(row)
    print(f"\n{'logits':10s} {'case':28s} {'ms':>8s} {'ratio':>6s} {'of forward':>10s}")
    for row in table:
        share = f"{100 * float(row['step_share']):9.1f}%" if "step_share" in row else ""
        print(f"{row['logits']:10s} {row['case']:28s} {row['ms']:8.3f} {row['ratio']:6.2f} {share:>10s}")


if __name__ == "__main__":
    main()
