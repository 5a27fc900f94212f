"""RankWorkers: a worker in a process of its own for every rank, driven from a test without an executor."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

from pegboard.contracts.worker import Worker, resolve_method
from pegboard.engine.bootstrap import prepare
from pegboard.plugins import ExecutorProvider, hookimpl
from pegboard.testing.rank_pool import RankPool
from pegboard.wire import GrammarOutput, KVCacheConfig, KVCacheGroup, ModelRunnerOutput, SchedulerOutput, World

_worker: Worker | None = None
"""Of this process, if it is a rank."""


class RankWorkers:
    """Booted workers of ``tp`` x ``pp`` ranks, for a ``PlanDriver``. ``settings`` are fields of the configuration."""

    def __init__(
        self, pool: RankPool, tp: int = 1, pp: int = 1, *, num_blocks: int = 120, timeout: float = 60.0, **settings: Any
    ) -> None:
        self._pool, self._timeout, self.world = pool, timeout, World(tp_size=tp, pp_size=pp)
        self._folder = tempfile.mkdtemp(prefix="pegboard-ranks-")
        executor = {**settings.pop("executor", {}), "tensor_parallel_size": tp, "pipeline_parallel_size": pp}
        settings["executor"] = {"name": "ranks", "num_threads": 1, **executor}
        try:
            calls = [(_boot, rank, tp, pp, self._folder, settings) for rank in range(self.world.size)]
            self.specs: list[dict[str, Any]] = pool.run(calls, timeout)
            self.reports = self.call("determine_available_memory")
            layers = {name: spec for rank in self.specs for name, spec in rank.items()}
            group = KVCacheGroup(layers=list(layers), spec=next(iter(layers.values())))
            self.call("initialize_cache", KVCacheConfig(num_blocks=num_blocks, groups=[group]))
            self.call("compile_or_warm_up")
        except BaseException:
            self.close()
            raise

    def call(self, method: str | Callable[..., Any], *args: Any) -> list[Any]:
        """On every rank, as ``Executor.collective_rpc`` does."""
        return self._pool.run([(_call, method, args)] * self.world.size, self._timeout)

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """The output rank's reply. All ranks that sample must agree on the tokens, and the others have none."""
        return self._agreed(self.call("execute_model", plan))

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        output = self._agreed(self.call("sample_tokens", grammar))
        assert output is not None
        return output

    def close(self) -> None:
        self._pool.outcomes([(_close,)] * self.world.size, self._timeout)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _agreed(self, replies: list[ModelRunnerOutput | None]) -> ModelRunnerOutput | None:
        first = self.world.output_rank
        assert all(reply == replies[first] for reply in replies[first:]), replies
        assert not any(token for reply in replies[:first] if reply is not None for token in reply.sampled_token_ids), replies
        return replies[first]


class _Ranks:
    """Names an executor, so that a composition can be made; nobody starts it."""

    @hookimpl
    def executors(self) -> Iterable[ExecutorProvider]:
        yield ExecutorProvider(
            name="ranks", target="pegboard.testing.thread_executor:ThreadExecutor", capabilities=frozenset({"tp", "pp"})
        )


def _boot(rank: int, tp: int, pp: int, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    global _worker
    plugins = {"ranks": _Ranks(), **settings.pop("plugins", {})}
    composition = prepare(plugins=plugins, **settings).composition
    world = World(rank=rank, local_rank=rank, tp_size=tp, pp_size=pp, rendezvous=folder)
    worker: Worker = composition.create("worker", world=world)
    _worker = worker
    worker.init_device()
    worker.load_model()
    return worker.get_kv_cache_specs()


def _call(method: str | Callable[..., Any], args: tuple[Any, ...]) -> Any:
    assert _worker is not None, "the rank has booted"
    return resolve_method(_worker, method)(*args) if isinstance(method, str) else method(_worker, *args)


def _close() -> None:
    global _worker
    worker, _worker = _worker, None
    if worker is not None:
        worker.shutdown()
