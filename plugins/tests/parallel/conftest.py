"""Several ranks on threads of the test's process: whole engines, and workers driven by hand-made plans."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM
from pegboard.engine.bootstrap import prepare
from pegboard.engine.kv_sizing import kv_cache_config
from pegboard.testing.plan_driver import PlanDriver
from pegboard.testing.thread_executor import THREADS, ThreadExecutor, ThreadRanks
from pegboard_plugins.worker.worker import StandardWorker

BLOCKS = 120
SLOTS = 8


def sections(tp: int, pp: int, **executor: Any) -> dict[str, Any]:
    """The sections ``plugins`` and ``executor`` of a configuration with so many ranks."""
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    return {"plugins": {"threads": ThreadRanks()}, "executor": {**THREADS, **sizes, **executor}}


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(4, 1000) for _ in range(length)] for length in lengths]


class Ranks:
    """Booted workers of all ranks, and a driver of plans."""

    def __init__(self, model: Path, tp: int = 1, pp: int = 1, **settings: Any) -> None:
        executor = settings.pop("executor", {})
        prepared = prepare(
            model=str(model),
            **sections(tp, pp, **executor),
            **{"dtype": "float32", "max_model_len": 256, **settings},
            scheduler={"max_num_seqs": SLOTS, "max_num_batched_tokens": 512},
            kv_cache={"block_size": 8, "memory": "16MiB"},
        )
        self.executor = ThreadExecutor(prepared.config, prepared.composition)
        self.specs = self.executor.get_kv_cache_specs()
        self.reports = self.executor.determine_available_memory()
        self.measured = kv_cache_config(prepared.config.kv_cache, self.specs, self.reports)
        fewer = prepared.config.kv_cache.model_copy(update={"num_blocks": BLOCKS - 1})
        kv_config = kv_cache_config(fewer, self.specs, self.reports)
        self.executor.initialize_from_config(kv_config)
        self.driver = PlanDriver(
            self.executor.execute_model,
            num_slots=SLOTS,
            block_size=8,
            num_blocks=BLOCKS,
            sample=self.executor.sample_tokens,
            vocab_size=prepared.composition.spec.vocab_size,
            sends_tokens=pp > 1,
            windows=kv_config.windows,
        )

    @property
    def workers(self) -> list[StandardWorker]:
        """For looking."""
        found = [worker for worker in self.executor.workers if isinstance(worker, StandardWorker)]
        assert len(found) == self.executor.world.size
        return found


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(*args: Any, **settings: Any) -> Ranks:
        made.append(Ranks(*args, **settings))
        return made[-1]

    yield make
    for each in made:
        each.executor.shutdown()


@pytest.fixture
def open_llm() -> Iterator[Callable[..., LLM]]:
    """``open_llm(folder, tp, pp, config fields)``: float32, one thread per rank, closed after the test."""
    opened: list[LLM] = []

    def open_(folder: Path | str, tp: int = 1, pp: int = 1, **options: Any) -> LLM:
        shared = sections(tp, pp, **options.pop("executor", {}))
        shared["plugins"] |= options.pop("plugins", {})
        opened.append(LLM(str(folder), **shared, **{"dtype": "float32", "kv_cache": {"num_blocks": 400}, **options}))
        return opened[-1]

    yield open_
    for llm in opened:
        llm.shutdown()
