"""What an executor adds to a step: from ``execute_model`` until its result is back, with workers that compute nothing.

    python benchmarks/executors.py [--executors uniproc mp ray ray-mq plain] [--rows 1 32 256] [--steps 500] [--rounds 5]

Two ranks each, but one with ``uniproc``. "plain": the same actors as those of ``ray``, called by ordinary actor calls, one to
each rank. The plan is one of a decode step of ``--rows`` requests; its worker makes as many tokens. Steps come ``--pause``
seconds after one another, as with a model, and "back to back". "two in flight": two stages of one rank each, the next step is
sent before the last one has come; microseconds per step beyond the millisecond that each stage computes. They take turns in
rounds, and only the one whose turn it is has ranks: those of a compiled graph use a core each also when there is nothing to do
(``idle_cores``, of all ranks together). Of the rounds the best figure counts, as other work on the machine only ever makes them
worse (``other_cores``: how much of that, with the ranks' own, there was in the best one). Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from message_queue import busy_seconds, wait_quiet

from pegboard.config import EngineConfig
from pegboard.plugins import Composition, PluginHost, compose
from pegboard.testing.conformance.executor import plan
from pegboard.testing.ranked_model import RankedPlugin
from pegboard.wire import SchedulerOutput

EXECUTORS = ("uniproc", "mp", "ray", "ray-mq", "plain")
STAGED = ("mp", "ray", "ray-mq")
RAYS = ("ray", "ray-mq", "plain")
WARM_UP = 100
STAGE_SECONDS = 0.001
IDLE_SECONDS = 1.0


def composition(name: str, tp: int, pp: int) -> Composition:
    executor = {"name": name, "tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    config = EngineConfig(
        model="scripted",
        executor={**executor, "worker": "pegboard.testing.rpc_worker:RpcWorker"},  # type: ignore[arg-type]
        plugins={"executor_mp": {"preload": []}} if name == "mp" else {},
    )
    return compose(config, PluginHost.load(config.plugins, extra={"ranked": RankedPlugin()}))


class Executor:
    """An executor of the kind ``name``: ``step`` and ``submit`` are all that is measured."""

    def __init__(self, name: str, tp: int, pp: int = 1) -> None:
        self._executor = composition(name, tp, pp).create("executor")
        self.step: Callable[[SchedulerOutput], Any] = self._executor.execute_model
        self.end = self._executor.shutdown

    def submit(self, step: SchedulerOutput) -> Any:
        return self._executor.execute_model(step, non_block=True)


class Plain:
    """The same ranks, by ordinary calls of actors, with the same packing."""

    def __init__(self, tp: int) -> None:
        import ray

        from pegboard.wire import World
        from pegboard_executor_mp.messages import Reply, Request
        from pegboard_executor_mp.packing import pack_plain, unpack
        from pegboard_executor_ray.crew import Crew
        from pegboard_executor_ray.options import Options

        crew = Crew(composition("ray", tp, 1), Options(), World(tp_size=tp), lambda error: None)
        actors = tuple(crew.actors)

        def step(plan: SchedulerOutput) -> Any:
            request = tuple(Request(0, "execute_model", pack_plain(((plan,), {})), None, 0))
            replies = ray.get([actor.call.remote(request) for actor in actors])
            return unpack(Reply(*replies[0]).content)

        self.step = step
        self.end = crew.stop


def start_ray() -> None:
    import ray

    store = 256 << 20
    ray.init(address="local", num_cpus=16, include_dashboard=False, object_store_memory=store, logging_level="warning")


@contextlib.contextmanager
def opened(name: str, tp: int = 1, pp: int = 1) -> Iterator[Any]:
    executor = Plain(tp) if name == "plain" else Executor(name, tp, pp)
    try:
        yield executor
    finally:
        executor.end()


# -- one measurement ---------------------------------------------------------------------------------------------------


def overhead(executor: Any, rows: int, steps: int, pause: float) -> dict[str, float]:
    """Microseconds of a step."""
    step = plan(0, rows=rows)
    for _ in range(WARM_UP):
        executor.step(step)
    times, began, busy, used = [], time.perf_counter(), busy_seconds(), time.process_time()
    for number in range(steps):
        step.step_id = number
        start = time.perf_counter()
        output = executor.step(step)
        times.append(time.perf_counter() - start)
        assert output.step_id == number
        if pause:
            time.sleep(pause)
    wall = time.perf_counter() - began
    times.sort()
    others = (busy_seconds() - busy - (time.process_time() - used)) / wall
    return {"p50_us": 1e6 * times[steps // 2], "p99_us": 1e6 * times[steps * 99 // 100], "other_cores": others}


def idle() -> dict[str, float]:
    """Cores that are in use while nothing is asked of the ranks, those of other work among them."""
    time.sleep(IDLE_SECONDS / 2)
    busy = busy_seconds()
    time.sleep(IDLE_SECONDS)
    return {"idle_cores": (busy_seconds() - busy) / IDLE_SECONDS}


def two_in_flight(executor: Executor, rows: int, steps: int) -> dict[str, float]:
    """Microseconds per step beyond what the slower stage computes."""
    under_way: deque[Any] = deque()
    began = time.perf_counter()
    for number in range(steps):
        under_way.append(executor.submit(plan(number, rows=rows, sleep=STAGE_SECONDS)))
        if len(under_way) == 2:
            under_way.popleft().result()
    while under_way:
        under_way.popleft().result()
    return {"p50_us": 1e6 * ((time.perf_counter() - began) / steps - STAGE_SECONDS)}


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    found = {figure: min(each[figure] for each in rounds) for figure in rounds[0]}
    if "other_cores" in found:
        found["other_cores"] = max(0.0, min(rounds, key=lambda each: each["p50_us"])["other_cores"])
    return {figure: float(f"{value:.3g}") for figure, value in found.items()}


def run(args: argparse.Namespace, names: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Row of the table to executor to figures."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {}

    def note(row: str, name: str, figures: dict[str, float]) -> None:
        found.setdefault(row, {}).setdefault(name, []).append(figures)

    if any(name in RAYS for name in names):
        start_ray()
    first = f"{args.rows[0]} rows"
    for _ in range(args.rounds):
        for name in names:
            wait_quiet(args.quiet_wait)
            with opened(name, 1 if name == "uniproc" else 2) as executor:
                for rows in args.rows:
                    note(f"{rows} rows", name, overhead(executor, rows, args.steps, args.pause))
                note(f"{first}, back to back", name, overhead(executor, args.rows[0], args.steps, 0.0))
                note("idle", name, idle())
            if name in STAGED:
                with opened(name, pp=2) as executor:
                    note(f"{first}, two in flight", name, two_in_flight(executor, args.rows[0], args.steps))
    return {row: {name: best(rounds) for name, rounds in executors.items()} for row, executors in found.items()}


# -- the whole run -----------------------------------------------------------------------------------------------------


def ratios(report: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Of p50s: how many times as much plain calls add as the graph does; the queue beside that of ``mp``."""
    pairs = {"plain / ray": ("plain", "ray"), "ray-mq / mp": ("ray-mq", "mp"), "ray / mp": ("ray", "mp")}
    return {
        row: {
            ratio: round(figures[over]["p50_us"] / figures[under]["p50_us"], 2)
            for ratio, (over, under) in pairs.items()
            if over in figures and under in figures and figures[under]["p50_us"] > 0
        }
        for row, figures in report.items()
        if row != "idle"
    }


def table(report: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = [f"{'':<24} {'executor':<10} {'p50 us':>8} {'p99 us':>8} {'other cores':>12}"]
    idle_cores = {name: figures["idle_cores"] for name, figures in report.get("idle", {}).items()}
    for row, executors in report.items():
        for name, figures in executors.items() if row != "idle" else ():
            cells = [figures.get(figure) for figure in ("p50_us", "p99_us", "other_cores")]
            texts = ["" if cell is None else f"{cell:,.0f}" if cell >= 10 else f"{cell:.2g}" for cell in cells]
            lines.append(f"{row:<24} {name:<10} {texts[0]:>8} {texts[1]:>8} {texts[2]:>12}")
    lines.append("cores in use while idle: " + ", ".join(f"{name} {cores:.2f}" for name, cores in idle_cores.items()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executors", nargs="+", choices=EXECUTORS, default=EXECUTORS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.003, help="seconds between steps")
    parser.add_argument("--quiet-wait", type=float, default=10, help="seconds to wait at most for other processes to calm down")
    args = parser.parse_args()
    names = list(args.executors)
    if importlib.util.find_spec("ray") is None:
        print("left out, as Ray is not installed:", *(name for name in names if name in RAYS))
        names = [name for name in names if name not in RAYS]
    report = run(args, names)
    print(table(report))
    told = {"cores": len(os.sched_getaffinity(0)), "rounds": args.rounds, "steps": args.steps, "pause_s": args.pause}
    print(json.dumps({"benchmark": "executors", **told, "rows": report, "ratios": ratios(report)}))


if __name__ == "__main__":
    main()
