"""Message queues side by side: Pegboard's, multiprocessing.Queue per reader, ZeroMQ PUB/SUB and, in its own Python, vLLM's.

    python benchmarks/message_queue.py [--peer-python /path/to/python] [--readers 1 2 4] [--reps 3] [--quiet-wait 20]

One process writes, each reader is a process. Latency is from the start of ``put`` until the last reader has the object, messages
one at a time with pauses (3 ms; more after large ones); ``random`` has pauses of random length (exponential, 3 ms on average).
CPU is that of the busiest reader, in percent of a core. Throughput is of messages put back to back. Idle CPU is of a reader that
waits in ``get``, from 1.5 s after the last message on. All queues take turns; of the repetitions the best figure counts, as
other work on the machine only ever makes them worse (``other_cores``: how much of it there was in the best repetition).
Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

QUEUES = ("pegboard", "multiprocessing", "zmq", "vllm")
SIZES = ((1 << 10, 400, 0.003), (64 << 10, 400, 0.003), (1 << 20, 150, 0.005), (24 << 20, 20, 0.1))
"""(bytes of a message, messages, seconds between them)"""
BULK = 3 << 29
"""Bytes of a throughput measurement at most; and at most 5,000 messages."""


# -- the queues --------------------------------------------------------------------------------------------------------


class Pegboard:
    def __init__(self, readers: int) -> None:
        from pegboard_executor_mp.queue import MessageQueue

        self.writer = MessageQueue.create(readers)
        self.handles = [self.writer.handle(i) for i in range(readers)]
        self.ready = self.writer.wait_ready
        self.put = self.writer.put

    @staticmethod
    def reader(handle: Any) -> Callable[[], Any]:
        from pegboard_executor_mp.queue import attach

        return attach(handle).get


class Multiprocessing:
    def __init__(self, readers: int) -> None:
        self.handles = [multiprocessing.get_context("spawn").Queue() for _ in range(readers)]

    def ready(self) -> None: ...

    def put(self, message: Any) -> None:
        for queue in self.handles:
            queue.put(message)

    @staticmethod
    def reader(handle: Any) -> Callable[[], Any]:
        return handle.get


class Zmq:
    def __init__(self, readers: int) -> None:
        import zmq

        address = f"ipc://{tempfile.mkdtemp()}/queue"
        self.socket = zmq.Context.instance().socket(zmq.XPUB)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.socket.bind(address)
        self.handles = [address] * readers

    def ready(self) -> None:
        for _ in self.handles:
            self.socket.recv()

    def put(self, message: Any) -> None:
        self.socket.send(pickle.dumps(message, 5), copy=False)

    @staticmethod
    def reader(handle: Any) -> Callable[[], Any]:
        import zmq

        socket = zmq.Context.instance().socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(handle)
        return lambda: pickle.loads(socket.recv(copy=False).buffer)


class Vllm:
    def __init__(self, readers: int) -> None:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        self.writer = MessageQueue(readers, readers, max_chunk_bytes=16 << 20, max_chunks=10)
        self.handles = [(self.writer.export_handle(), i) for i in range(readers)]
        self.ready = self.writer.wait_until_ready
        self.put = self.writer.enqueue

    @staticmethod
    def reader(handle: Any) -> Callable[[], Any]:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        queue = MessageQueue.create_from_handle(*handle)
        queue.wait_until_ready()
        return queue.dequeue


# -- one measurement ---------------------------------------------------------------------------------------------------


def read(kind: str, handle: Any, orders: Any) -> None:
    """A reader's process: for each order, take that many messages and report when each had come."""
    get = KINDS[kind].reader(handle)
    while count := orders.recv():
        times = []
        for _ in range(count):
            message = get()
            times.append(time.monotonic())
        del message
        orders.send(times)


class Bench:
    def __init__(self, kind: str, readers: int) -> None:
        self.queue = KINDS[kind](readers)
        context = multiprocessing.get_context("spawn")
        self.orders, self.processes = [], []
        for handle in self.queue.handles:
            here, there = context.Pipe()
            process = context.Process(target=read, args=(kind, handle, there), daemon=True)
            process.start()
            self.orders.append(here)
            self.processes.append(process)
        self.queue.ready()
        self.run([b"hello"] * 20, 0.003)

    def run(self, messages: list[Any], pauses: float | list[float]) -> dict[str, float]:
        """Put them with pauses after each; p50, p99 and put in microseconds, CPU in percent of a core."""
        count = len(messages)
        for order in self.orders:
            order.send(count)
        time.sleep(0.2)
        began, busy, used = time.monotonic(), busy_seconds(), self.cpu_seconds()
        put, sent, done = self.queue.put, [], []
        for number, message in enumerate(messages):
            sent.append(time.monotonic())
            put(message)
            done.append(time.monotonic())
            if pause := pauses if isinstance(pauses, float) else pauses[number]:
                time.sleep(pause)
        times = [order.recv() for order in self.orders]
        wall = time.monotonic() - began
        cpu = [now - before for now, before in zip(self.cpu_seconds(), used, strict=True)]
        others = busy_seconds() - busy - sum(cpu)
        latency = sorted(max(each) - start for each, start in zip(zip(*times, strict=True), sent, strict=True))
        return {
            "p50_us": 1e6 * latency[count // 2],
            "p99_us": 1e6 * latency[count * 99 // 100],
            "put_us": 1e6 * sorted(b - a for a, b in zip(sent, done, strict=True))[count // 2],
            "cpu": 100 * max(cpu[1:]) / wall,
            "other_cores": others / wall,
            "seconds": max(each[-1] for each in times) - began,
        }

    def idle(self) -> float:
        for order in self.orders:
            order.send(1)
        time.sleep(1.5)
        used = self.cpu_seconds()
        time.sleep(2.0)
        now = self.cpu_seconds()
        self.queue.put(b"end")
        for order in self.orders:
            order.recv()
        return 100 * max(b - a for a, b in zip(used[1:], now[1:], strict=True)) / 2.0

    def cpu_seconds(self) -> list[float]:
        """Of the writer's process and each reader's."""
        return [process_seconds(pid) for pid in (os.getpid(), *(process.pid for process in self.processes))]

    def end(self) -> None:
        for order in self.orders:
            order.send(0)
        for process in self.processes:
            process.join(10)
            process.kill()


def process_seconds(pid: int | None) -> float:
    """CPU time of all threads, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def busy_seconds() -> float:
    """CPU time of the whole machine."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measure(kind: str, readers: int, quiet_wait: float) -> dict[str, dict[str, float]]:
    rng = random.Random(0)
    bench = Bench(kind, readers)
    rows = {}
    for size, count, pause in SIZES:
        message = rng.randbytes(size)
        wait_quiet(quiet_wait)
        row = bench.run([message] * count, pause)
        many = min(5000, BULK // readers // size)
        seconds = bench.run([message] * many, 0.0)["seconds"]
        rows[str(size)] = row | {"mb_per_s": many * size / 1e6 / seconds, "messages_per_s": many / seconds}
    wait_quiet(quiet_wait)
    rows["random"] = bench.run([rng.randbytes(1024)] * 400, [rng.expovariate(1 / 0.003) for _ in range(400)])
    rows["idle"] = {"cpu": bench.idle()}
    bench.end()
    return rows


def wait_quiet(limit: float, cores: float = 0.2) -> None:
    """Until other processes use less than ``cores``; ``limit`` seconds at most."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        before = busy_seconds()
        time.sleep(0.5)
        if (busy_seconds() - before) / 0.5 < cores:
            return


# -- the whole run -----------------------------------------------------------------------------------------------------

KINDS: dict[str, Any] = dict(zip(QUEUES, (Pegboard, Multiprocessing, Zmq, Vllm), strict=True))
HIGHER_IS_BETTER = ("mb_per_s", "messages_per_s")


def best(repetitions: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    result: dict[str, dict[str, float]] = {}
    for row in repetitions[0]:
        result[row] = {
            figure: (max if figure in HIGHER_IS_BETTER else min)(repetition[row][figure] for repetition in repetitions)
            for figure in repetitions[0][row]
            if figure != "seconds"
        }
    return {row: {figure: float(f"{value:.3g}") for figure, value in figures.items()} for row, figures in result.items()}


def in_process(python: str, kind: str, readers: int, quiet_wait: float) -> dict[str, dict[str, float]]:
    command = [python, __file__, "--one", kind, "--readers", str(readers), "--quiet-wait", str(quiet_wait)]
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{kind} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(report: dict[str, dict[str, dict[str, dict[str, float]]]]) -> str:
    head = ("p50 us", "p99 us", "put us", "CPU %", "MB/s", "1/s")
    widths = (9, 9, 8, 6, 8, 8)
    lines = [f"{'readers':>7} {'message':>10}  {'queue':<16} " + " ".join(map(str.rjust, head, widths))]
    for readers, queues in report.items():
        for row in next(iter(queues.values())):
            for queue, rows in queues.items():
                figures = [rows[row].get(name) for name in ("p50_us", "p99_us", "put_us", "cpu", "mb_per_s", "messages_per_s")]
                cells = ["" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in figures]
                text = " ".join(map(str.rjust, cells, widths))
                lines.append(f"{readers:>7} {row:>10}  {queue:<16} {text}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--queues", nargs="+", choices=QUEUES, default=QUEUES)
    parser.add_argument("--peer-python", help="a Python that has vLLM; without it vLLM's queue is left out")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--quiet-wait", type=float, default=20, help="seconds to wait at most for other processes to calm down")
    parser.add_argument("--one", choices=QUEUES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.readers[0], args.quiet_wait)))
        return
    queues = {queue: args.peer_python if queue == "vllm" else sys.executable for queue in args.queues}
    queues = {queue: python for queue, python in queues.items() if python}
    report: dict[str, dict[str, Any]] = {}
    for readers in args.readers:
        runs: dict[str, list[Any]] = {queue: [] for queue in queues}
        for _ in range(args.reps):
            for queue, python in queues.items():
                runs[queue].append(in_process(python, queue, readers, args.quiet_wait))
        report[str(readers)] = {queue: best(repetitions) for queue, repetitions in runs.items()}
    print(table(report))
    print(json.dumps({"benchmark": "message_queue", "cores": len(os.sched_getaffinity(0)), "reps": args.reps, "readers": report}))


if __name__ == "__main__":
    main()
