"""FaultyWorker: a worker without device or model that breaks at a set moment, for tests of executors and engines."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any, Final

from pegboard.contracts.worker import rpc
from pegboard.testing.fakes import RunnerWorker
from pegboard.wire import KVCacheConfig, MemoryReport, ModelRunnerOutput, SchedulerOutput

VARIABLE: Final = "FAULTY_WORKER"
ROOT_CAUSE: Final = "boom-17"
HANG_SECONDS: Final = 600.0


def order(rank: int, at: str, what: str) -> dict[str, str]:
    """The environment variable that makes ``rank`` break. ``at``: "boot" (as it loads the model), the name of a later boot phase,
    "prefill" (of a second request) or "decode"; ``what``: "raise", "hang", or the name of a signal that it sends itself."""
    return {VARIABLE: json.dumps({"rank": rank, "at": at, "what": what})}


class FaultyWorker(RunnerWorker):
    """Computes like ``RunnerWorker``; ``step_seconds`` is how long each step takes at least."""

    step_seconds = 0.002

    def __init__(self, config: Any, composition: Any, world: Any) -> None:
        super().__init__(config, composition, world)
        self._order: dict[str, Any] = json.loads(os.environ.get(VARIABLE, "{}"))
        self._requests = 0

    def load_model(self) -> None:
        super().load_model()
        self._moment("boot")

    def determine_available_memory(self) -> MemoryReport:
        self._moment("determine_available_memory")
        return super().determine_available_memory()

    def initialize_cache(self, kv_config: KVCacheConfig) -> None:
        super().initialize_cache(kv_config)
        self.runner.mirror.keeps_samples = self.world.pp_size == 1
        self._moment("initialize_cache")

    def compile_or_warm_up(self) -> None:
        super().compile_or_warm_up()
        self._moment("compile_or_warm_up")

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        self._requests += len(plan.new_requests)
        time.sleep(self.step_seconds)
        if plan.new_requests and self._requests > 1:
            self._moment("prefill")
        if len(plan.slots) > len(plan.new_requests):
            self._moment("decode")
        return super().execute_model(plan)

    @rpc("test")
    def break_now(self, rank: int, what: str) -> None:
        if rank == self.world.rank:
            break_down(what)

    def _moment(self, name: str) -> None:
        if self._order.get("at") == name and self._order["rank"] == self.world.rank:
            break_down(self._order.pop("what"))
            self._order.clear()


def break_down(what: str) -> None:
    """Returns after a signal that was ignored."""
    if what == "raise":
        raise RuntimeError(ROOT_CAUSE)
    if what == "hang":
        time.sleep(HANG_SECONDS)
    else:
        os.kill(os.getpid(), signal.Signals[what])
