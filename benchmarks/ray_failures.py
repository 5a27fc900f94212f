"""What callers see, and how soon, when an actor, a raylet or the engine's process is killed; and what is left in the cluster.

    python benchmarks/ray_failures.py [--executors ray ray-mq]

Two virtual nodes on this machine; this process, which holds the engine, is on the first one. Two ranks, that compute nothing. All
is killed with SIGKILL. "in a step": while both ranks are in a step that does not end, another thread waits for a call that comes
after it, and a third one for a health check. Seconds are from the signal until the caller has its error, until the failure
callback is called, and until nothing is left: no process of a rank, no actor, no placement group, nothing reserved, no file in
shared memory. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import ray
from ray._private.state import actors
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from pegboard.config import EngineConfig
from pegboard.contracts.executor import Executor
from pegboard.plugins import PluginHost, compose
from pegboard.testing.conformance.executor import plan
from pegboard.testing.ranked_model import RankedPlugin

EXECUTORS = ("ray", "ray-mq")
PATIENCE = 60.0
FOREVER = 600.0
NODE: dict[str, Any] = {"object_store_memory": 100 << 20, "include_dashboard": False}
HOLDER = """
import sys, ray_failures
executor = ray_failures.open_executor(sys.argv[1], far=True)
print(*ray_failures.pids_of(executor), flush=True)
executor.execute_model(ray_failures.plan(1, sleep=600.0))
"""


def open_executor(name: str, far: bool) -> Executor:
    """``far``: the second rank is on the other node."""
    options: dict[str, Any] = {"strategy": "STRICT_SPREAD"} if far else {"strategy": "STRICT_PACK", "resources": {"near": 1}}
    settings = {"name": name, "worker": "pegboard.testing.rpc_worker:RpcWorker", "tensor_parallel_size": 2}
    config = EngineConfig(model="scripted", executor=settings, plugins={"executor_ray": options})  # type: ignore[arg-type]
    executor: Executor = compose(config, PluginHost.load(config.plugins, extra={"ranked": RankedPlugin()})).create("executor")
    return executor


def pids_of(executor: Executor) -> list[int]:
    return list(executor.collective_rpc(lambda worker: os.getpid()))


# -- what callers see --------------------------------------------------------------------------------------------------


class Callers:
    """Each in a thread of its own; ``seen``: what it got, and when (``time.monotonic``)."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[str, float]] = {}
        self._threads: list[threading.Thread] = []

    def start(self, name: str, call: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                call()
                self.note(name, "no error")
            except Exception as error:
                self.note(name, f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append(thread)
        time.sleep(0.2)

    def note(self, name: str, what: str) -> None:
        self.seen[name] = " ".join(what.split())[:200], time.monotonic()

    def report(self, since: float) -> dict[str, dict[str, Any]]:
        end = time.monotonic() + PATIENCE
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return {name: {"saw": what, "seconds": round(when - since, 2)} for name, (what, when) in self.seen.items()}


def watch(executor: Executor, in_a_step: bool) -> Callers:
    callers = Callers()
    executor.register_failure_callback(lambda cause: callers.note("callback", f"{type(cause).__name__}: {cause}"))
    if in_a_step:
        callers.start("step", lambda: executor.execute_model(plan(1, sleep=FOREVER)))
        callers.start("call", lambda: executor.collective_rpc("echo", (1,)))
        callers.start("health check", executor.check_health)
    return callers


# -- what is left ------------------------------------------------------------------------------------------------------


def left(pids: list[int]) -> list[str]:
    groups = [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
    running = [actor["ActorClassName"] for actor in actors().values() if actor["State"] != "DEAD"]
    total, free = ray.cluster_resources(), ray.available_resources()
    reserved = [name for name in ("CPU", "near") if total.get(name, 0) != free.get(name, 0)]
    files = [name for name in os.listdir("/dev/shm") if name.startswith("pegboard-") and any(f"-{pid}-" in name for pid in pids)]
    return [*(f"process {pid}" for pid in pids if psutil.pid_exists(pid)), *groups, *running, *reserved, *files]


def until_clean(pids: list[int], since: float) -> dict[str, Any]:
    """``ranks_gone``: seconds until the ranks have no process any more; ``clean``: until the cluster knows of nothing either."""
    gone = None
    while (remains := left(pids)) and time.monotonic() < since + PATIENCE:
        if gone is None and not any(map(psutil.pid_exists, pids)):
            gone = time.monotonic()
        time.sleep(0.02)
    now = time.monotonic()
    return {"ranks_gone": round((gone or now) - since, 2), "clean": round(now - since, 2), "left": remains}


def raylets_of(cluster: Cluster) -> list[int]:
    return [process.process.pid for node in cluster.list_all_nodes() for process in node.all_processes.get("raylet", ())]


def remove_semaphores(raylets: list[int]) -> None:
    """Of channels of compiled graphs: a raylet that is killed leaves them."""
    names = tuple(f"sem.{kind}{pid}-" for kind in ("hdr", "obj") for pid in raylets)
    for name in os.listdir("/dev/shm"):
        if name.startswith(names):
            os.unlink(f"/dev/shm/{name}")


# -- faults ------------------------------------------------------------------------------------------------------------


def kill_actor(name: str, cluster: Cluster, in_a_step: bool) -> dict[str, Any]:
    executor = open_executor(name, far=False)
    pids = pids_of(executor)
    callers = watch(executor, in_a_step)
    since = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    return _after(executor, callers, pids, since)


def kill_raylet(name: str, cluster: Cluster, in_a_step: bool) -> dict[str, Any]:
    node = cluster.add_node(num_cpus=1, **NODE)
    cluster.wait_for_nodes()
    executor = open_executor(name, far=True)
    pids = pids_of(executor)
    callers = watch(executor, in_a_step)
    raylet = node.all_processes["raylet"][0].process
    since = time.monotonic()
    raylet.kill()
    result = _after(executor, callers, pids, since)
    cluster.remove_node(node, allow_graceful=False)
    remove_semaphores([raylet.pid])
    return result


def _after(executor: Executor, callers: Callers, pids: list[int], since: float) -> dict[str, Any]:
    while "callback" not in callers.seen and time.monotonic() < since + PATIENCE:
        time.sleep(0.01)
    later = Callers()
    asked = time.monotonic()
    later.start("call afterwards", lambda: executor.collective_rpc("echo", (1,), timeout=PATIENCE))
    seen = callers.report(since) | later.report(asked)
    state = until_clean(pids, since)
    executor.shutdown()
    return {"callers": seen, **state}


def kill_driver(name: str, cluster: Cluster, in_a_step: bool) -> dict[str, Any]:
    node = cluster.add_node(num_cpus=1, **NODE)
    cluster.wait_for_nodes()
    environment = os.environ | {"RAY_ADDRESS": cluster.address, "PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}
    command = [sys.executable, "-c", HOLDER, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True) as holder:
        assert holder.stdout is not None
        pids = [int(pid) for pid in holder.stdout.readline().split()]
        time.sleep(0.5)
        since = time.monotonic()
        holder.kill()
    state = until_clean(pids, since)
    raylet = node.all_processes["raylet"][0].process
    alive = raylet.poll() is None
    cluster.remove_node(node)
    remove_semaphores([raylet.pid])
    return {"callers": {}, **state, "raylet_alive": alive}


FAULTS: dict[str, tuple[Callable[[str, Cluster, bool], dict[str, Any]], bool]] = {
    "actor, idle": (kill_actor, False),
    "actor, in a step": (kill_actor, True),
    "raylet, idle": (kill_raylet, False),
    "raylet, in a step": (kill_raylet, True),
    "engine's process, in a step": (kill_driver, True),
}


def table(report: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = [f"{'killed':<28} {'executor':<8} {'caller':<16} {'seconds':>8}  saw"]
    for fault, executors in report.items():
        for name, result in executors.items():
            for caller, told in result["callers"].items():
                lines.append(f"{fault:<28} {name:<8} {caller:<16} {told['seconds']:>8}  {told['saw'][:110]}")
            remains = ", ".join(result["left"]) or "nothing left"
            lines.append(f"{fault:<28} {name:<8} {'(ranks gone)':<16} {result['ranks_gone']:>8}")
            lines.append(f"{fault:<28} {name:<8} {'(cluster clean)':<16} {result['clean']:>8}  {remains}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executors", nargs="+", choices=EXECUTORS, default=EXECUTORS)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    args = parser.parse_args()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "resources": {"near": 4}, **NODE})
    ray.init(address=cluster.address, logging_level="warning", log_to_driver=False)
    report: dict[str, dict[str, dict[str, Any]]] = {}
    try:
        for fault in args.faults:
            break_it, in_a_step = FAULTS[fault]
            for name in args.executors:
                report.setdefault(fault, {})[name] = break_it(name, cluster, in_a_step)
    finally:
        ray.shutdown()
        raylets = raylets_of(cluster)
        cluster.shutdown()
        remove_semaphores(raylets)
    print(table(report))
    print(json.dumps({"benchmark": "ray_failures", "cores": len(os.sched_getaffinity(0)), "faults": report}))


if __name__ == "__main__":
    main()
