"""An executor and a driver of plans for the tests of whole workers on checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pegboard.engine.bootstrap import prepare
from pegboard.testing.plan_driver import GREEDY, PlanDriver
from pegboard.wire import KVCacheConfig, KVCacheGroup, SamplingParams
from pegboard_plugins.executors.uniproc import UniProcExecutor
from pegboard_plugins.worker.worker import StandardWorker

BLOCKS = 120


class Engine:
    """An executor and a driver of plans."""

    def __init__(self, model: str, num_blocks: int = BLOCKS, block_size: int = 8, slots: int = 8, **settings: Any) -> None:
        settings = {"dtype": "float32", "max_model_len": 256, **settings}
        prepared = prepare(
            model=model,
            executor={"num_threads": 1},
            scheduler={"max_num_seqs": slots, "max_num_batched_tokens": 512},
            kv_cache={"block_size": block_size, "memory": "16MiB"},
            **settings,
        )
        self.composition = prepared.composition
        self.executor = UniProcExecutor(prepared.config, prepared.composition)
        self.report = self.executor.determine_available_memory()[0]
        specs = self.executor.get_kv_cache_specs()[0]
        group = KVCacheGroup(layers=list(specs), spec=next(iter(specs.values())))
        self.executor.initialize_from_config(KVCacheConfig(num_blocks=num_blocks, groups=[group]))
        self.driver = PlanDriver(
            self.executor.execute_model,
            num_slots=slots,
            block_size=block_size,
            num_blocks=num_blocks,
            sample=self.executor.sample_tokens,
            vocab_size=prepared.composition.spec.vocab_size,
        )

    @property
    def worker(self) -> StandardWorker:
        """For looking; its methods belong to the executor's thread."""
        worker = self.executor._worker
        assert isinstance(worker, StandardWorker)
        return worker

    def generate(
        self, prompts: dict[str, list[int]], count: int, chunk: int = 1 << 30, sampling: SamplingParams = GREEDY
    ) -> dict[str, list[int]]:
        for name, prompt in prompts.items():
            self.driver.add(name, prompt, sampling)
        found = self.driver.generate(count, chunk)
        for name in prompts:
            self.driver.finish(name)
        return found


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(*args: Any, **settings: Any) -> Engine:
        made.append(Engine(*args, **settings))
        return made[-1]

    yield make
    for each in made:
        each.executor.shutdown()
