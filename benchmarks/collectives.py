"""All-reduces of a decode and a prefill step: shared memory against gloo, in one run.

    python benchmarks/collectives.py [--ranks 2 3] [--calls 200] [--rounds 5] [--skew 200] [--threads 1] [--bind]

Ranks are processes with one compute thread each. "lock step": calls back to back. "skewed": before each call every rank
computes for a random time of up to ``--skew`` microseconds, as ranks do between the collectives of a forward. "asleep": one rank
comes 5 ms after the others, as the next stage of a pipeline waits. A call's latency is from the last rank's arrival to the last
one's return. The communicators take turns in rounds, so that other work on the machine meets both. ``cpu`` is what a rank uses of
a core while it waits. ``--bind`` gives each rank a core of its own, as far as there are any; without it the system may put ranks
that wait for one another on one core, beside an idle one. Prints a JSON line, then a table.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from pegboard.contracts.communicator import Communicator
from pegboard_plugins.communicators.shared_memory import SharedMemoryCommunicator
from pegboard_plugins.communicators.torch_distributed import TorchDistributedCommunicator

SHAPES = ((1, 576), (32, 576), (512, 576))
DTYPES = (torch.float32, torch.bfloat16)
LATE_SECONDS, LATE_CALLS = 0.005, 20
KINDS: dict[str, type[Communicator]] = {"shared_memory": SharedMemoryCommunicator, "gloo": TorchDistributedCommunicator}


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    dtype: torch.dtype
    mode: str

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}, {self.mode}"


@dataclass
class Result:
    """Microseconds; ``cpu`` in cores per rank."""

    ranks: int
    case: str
    kind: str
    p50: float
    p99: float
    cpu: float


def cases() -> list[Case]:
    return [Case(shape, dtype, mode) for mode in ("lock step", "skewed") for shape in SHAPES for dtype in DTYPES] + [
        Case(SHAPES[0], torch.float32, "asleep")
    ]


def compute(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def one_round(comm: Communicator, case: Case, calls: int, skew: float, seed: int) -> tuple[np.ndarray, float]:
    """Times [calls, 2] of start and return in seconds, and the processor time of a call that is not ``compute``."""
    rng = np.random.default_rng(seed)
    tensor = torch.zeros(case.shape, dtype=case.dtype)
    pauses = rng.uniform(0, skew, calls) if case.mode == "skewed" else np.zeros(calls)
    times = np.empty((calls, 2))
    for _ in range(5):
        comm.all_reduce(tensor)
    used = 0.0
    for i, pause in enumerate(pauses.tolist()):
        if pause:
            compute(pause)
        if case.mode == "asleep" and comm.rank == 0:
            time.sleep(LATE_SECONDS)
        began_cpu, began = time.process_time(), time.perf_counter()
        tensor = comm.all_reduce(tensor)
        times[i] = began, time.perf_counter()
        used += time.process_time() - began_cpu
    return times, used


def run_rank(rank: int, ranks: int, folder: str, args: argparse.Namespace, pipe: Connection) -> None:
    torch.set_num_threads(args.threads)
    if args.bind:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    group: dict[str, Any] = {
        "rank": rank,
        "world_size": ranks,
        "rendezvous": folder,
        "device": torch.device("cpu"),
        "timeout": 60.0,
    }
    comms = {name: kind(group=name, **group) for name, kind in KINDS.items()}
    found: dict[tuple[int, str], list[tuple[np.ndarray, float]]] = {}
    with torch.inference_mode():
        for number in range(args.rounds):
            for i, case in enumerate(cases()):
                calls = LATE_CALLS if case.mode == "asleep" else args.calls
                for name, comm in comms.items():
                    comm.barrier()
                    seed = 1000 * number + rank
                    found.setdefault((i, name), []).append(one_round(comm, case, calls, args.skew * 1e-6, seed))
    for comm in comms.values():
        comm.close()
    pipe.send(found)


def measure(ranks: int, args: argparse.Namespace) -> list[Result]:
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe() for _ in range(ranks)]
        processes = [context.Process(target=run_rank, args=(r, ranks, folder, args, ends[r][1])) for r in range(ranks)]
        for process in processes:
            process.start()
        for _, end in ends:
            end.close()  # so that a rank that fails is an error here
        found = [end.recv() for end, _ in ends]
        for process in processes:
            process.join()
    results = []
    for i, case in enumerate(cases()):
        for name in KINDS:
            times = np.concatenate(
                [np.stack([t for t, _ in rounds], 1) for rounds in zip(*(f[i, name] for f in found), strict=True)]
            )
            latencies = 1e6 * (times[..., 1].max(1) - times[..., 0].max(1))
            waiting = range(1, ranks) if case.mode == "asleep" else range(ranks)
            spent = sum(used for rank in waiting for _, used in found[rank][i, name])
            elapsed = sum(float((times[:, rank, 1] - times[:, rank, 0]).sum()) for rank in waiting)
            p50, p99 = np.percentile(latencies, [50, 99]).tolist()
            results.append(Result(ranks, str(case), name, round(p50, 1), round(p99, 1), round(spent / elapsed, 3)))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--calls", type=int, default=200, help="per round and case")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skew", type=float, default=200, help="microseconds")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of a rank")
    parser.add_argument("--bind", action="store_true", help="each rank to a core")
    args = parser.parse_args()
    results = [result for ranks in args.ranks for result in measure(ranks, args)]
    print(json.dumps({"benchmark": "collectives", "results": [asdict(result) for result in results]}))
    print(f"{'us':42}{'shared memory':>24}{'gloo':>24}{'ratio':>16}{'cpu':>14}")
    print(f"{'':42}" + f"{'p50':>12}{'p99':>12}" * 2 + f"{'p50':>8}{'p99':>8}{'shm':>7}{'gloo':>7}")
    for ours, theirs in zip(results[::2], results[1::2], strict=True):
        row = f"{ours.ranks} ranks, {ours.case:33}" + "".join(f"{r.p50:12.1f}{r.p99:12.1f}" for r in (ours, theirs))
        print(f"{row}{theirs.p50 / ours.p50:8.1f}{theirs.p99 / ours.p99:8.1f}{ours.cpu:7.2f}{theirs.cpu:7.2f}")


if __name__ == "__main__":
    main()
