"""A script that holds an engine, without a main guard, for tests that break this process.

Its arguments are MOMENT, WHAT and the number of RANKS. It says "ready" on stdout at that moment, then waits to be broken. WHAT
"raise": raises there, once told to on stdin; "fork": has forked a process before, which stays.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from pegboard import LLMEngine, SamplingParams
from pegboard.plugins import hookimpl
from pegboard.testing.faulty_worker import order
from pegboard.testing.ranked_model import RankedPlugin

moment, what, ranks = sys.argv[1:4]


def here() -> None:
    if what == "fork" and os.fork() == 0:
        os.closerange(0, 3)
        time.sleep(600)
    print("ready", flush=True)
    if what == "raise":
        sys.stdin.readline()
        raise RuntimeError("boom-17")


class Plugin(RankedPlugin):
    """Lives in the script: it goes to the ranks by value."""

    @hookimpl
    def engine_starting(self, info: Any) -> None:
        if moment == "boot":
            here()
            time.sleep(600)


if moment == "prefill":
    os.environ.update(order(1, "prefill", "hang"))
engine = LLMEngine(
    "scripted",
    plugins={"ranked": Plugin(), "executor_mp": {"preload": []}},
    executor={"name": "mp", "worker": "pegboard.testing.faulty_worker:FaultyWorker", "tensor_parallel_size": int(ranks)},
    kv_cache={"num_blocks": 256},
)
params = SamplingParams(max_tokens=4000, temperature=0, ignore_eos=True)
if moment == "idle":
    here()
    time.sleep(600)
engine.add_request("first", "prompt", params)
for _ in range(10):
    engine.step()
if moment == "prefill":  # of this one, whose step hangs
    engine.add_request("second", "prompt", params)
here()
while True:
    engine.step()
