"""RpcWorker: a worker without device or model that does as it is told, for tests of executors."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from pegboard.contracts.worker import WorkerExtension, rpc
from pegboard.testing.fakes import BootingWorker
from pegboard.wire import GrammarOutput, KVCacheSpec, ModelRunnerOutput, SchedulerOutput


class RpcWorker(BootingWorker):
    """Every row that samples gets the token ``RpcWorker.TOKEN``. ``plan.ext["rpc"]`` may hold ``{"sleep": seconds}``,
    ``{"raise": text}`` and, with either, ``"rank"``: the only rank that does it; and ``{"meet": {rank: (make, wait)}}``, files
    that a rank makes and then waits for, None for no such file. Methods refuse to overlap."""

    TOKEN = 7
    PATIENCE = 60.0
    """Seconds to wait for a file."""
    SPEC = KVCacheSpec(block_size=16, num_kv_heads=1, head_size=8, dtype="float32")

    def __init__(self, config: Any, composition: Any, world: Any) -> None:
        super().__init__(config, composition, world)
        self.extensions["rpc"] = RpcExtension()
        self._busy = threading.Lock()
        self._pending: SchedulerOutput | None = None

    def check_health(self) -> None: ...

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return {"layer": self.SPEC}

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        if not self._busy.acquire(blocking=False):
            raise AssertionError("two calls at once")
        try:
            self._act(plan.ext.get("rpc", {}))
        finally:
            self._busy.release()
        if plan.grammar_slots:
            self._pending = plan
            return None
        return self._output(plan)

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        plan, self._pending = self._pending, None
        if plan is None:
            raise RuntimeError("sample_tokens without a step that waits for it")
        return self._output(plan)

    @rpc("test")
    def echo(self, value: Any, **more: Any) -> Any:
        """``value``, and the rank that it came by."""
        return {"rank": self.world.rank, "value": value, **more}

    @rpc("test")
    def sleep_then(self, seconds: float, value: Any) -> Any:
        time.sleep(seconds)
        return value

    @rpc("test")
    def called(self) -> list[str]:
        """Names of the life-cycle methods that ran, in order."""
        return list(self.calls)

    def undeclared(self) -> None:
        """No RPC: a worker has ordinary methods too."""

    def _act(self, wish: dict[str, Any]) -> None:
        self._meet(*wish.get("meet", {}).get(self.world.rank, (None, None)))
        if wish.get("rank", self.world.rank) != self.world.rank:
            return
        if "sleep" in wish:
            time.sleep(wish["sleep"])
        if "raise" in wish:
            raise RuntimeError(wish["raise"])

    def _meet(self, make: str | None, wait: str | None) -> None:
        if make is not None:
            Path(make).touch()
        end = time.monotonic() + self.PATIENCE
        while wait is not None and not Path(wait).exists():
            assert time.monotonic() < end, f"{wait} was never made"
            time.sleep(0.001)

    def _output(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        tokens = [[self.TOKEN] if n else [] for n in plan.num_to_sample]
        return ModelRunnerOutput(step_id=plan.step_id, slots=list(plan.slots), sampled_token_ids=tokens)


class RpcExtension(WorkerExtension):
    """Has one method, reached as ``rpc.double``."""

    @rpc("test")
    def double(self, value: int) -> int:
        return 2 * value
