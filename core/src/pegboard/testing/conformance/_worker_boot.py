"""Boots a worker with the scripted model, for the tests in ``worker``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from pegboard.contracts.worker import Worker
from pegboard.engine.bootstrap import prepare
from pegboard.testing.fakes import NextToken, hash_model
from pegboard.testing.joint_worker import JointWorker
from pegboard.testing.plan_driver import PlanDriver
from pegboard.testing.scripted_model import ScriptedPlugin
from pegboard.testing.thread_executor import THREADS, ThreadRanks
from pegboard.wire import KVCacheConfig, KVCacheGroup, World

VOCAB = 500
BLOCK = 4
BLOCKS = 200
SLOTS = 8
PROMPTS = {"a": [5, 6, 7], "b": list(range(10, 31)), "c": [9], "d": [3] * 16}
MODEL = hash_model(VOCAB)


def continuation(prompt: list[int], count: int, model: NextToken = MODEL) -> list[int]:
    """What the model says after ``prompt``."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(model(tokens))
    return tokens[len(prompt) :]


class BootedWorker:
    """``worker``: the provider's name, or ``package.module:Class``. ``ranks``: how many share each layer, and how many stages
    there are; each rank's worker runs on a thread of its own."""

    worker = "default"
    ranks = (1, 1)

    def boot(self, model: NextToken = MODEL, host_blocks: int = 0, windows: Sequence[int | None] = (None,)) -> Worker:
        """A worker that is ready for steps. ``windows``: of the layers of each stage, which are groups of their own."""
        tp, pp = self.ranks
        several = {**THREADS, "tensor_parallel_size": tp, "pipeline_parallel_size": pp} if tp * pp > 1 else {}
        prepared = prepare(
            model="scripted",
            plugins={
                "scripted": ScriptedPlugin(
                    model, vocab_size=VOCAB, max_model_len=256, num_layers=pp * len(windows), windows=windows
                ),
                "threads": ThreadRanks(),
            },
            executor={"worker": self.worker, "num_threads": 1, **several},
            scheduler={"max_num_seqs": SLOTS, "max_num_batched_tokens": 256},
            kv_cache={"block_size": BLOCK, "memory": "1MiB"},
        )
        worker: Worker
        if several:
            worker = JointWorker(prepared.config, prepared.composition)
        else:
            worker = prepared.composition.create("worker", world=World())
        worker.init_device()
        worker.load_model()
        specs = worker.get_kv_cache_specs()
        report = worker.determine_available_memory()
        assert report.available == 1 << 20, "kv_cache.memory is stated"
        kinds = list(dict.fromkeys(specs.values()))
        groups = [KVCacheGroup(layers=[name for name, spec in specs.items() if spec == kind], spec=kind) for kind in kinds]
        worker.initialize_cache(KVCacheConfig(num_blocks=BLOCKS, groups=groups, num_host_blocks=host_blocks))
        worker.compile_or_warm_up()
        return worker

    def drive(self, worker: Worker, windows: Sequence[int | None] = (None,)) -> PlanDriver:
        """Plans for ``worker``, whose batch must be empty."""
        return PlanDriver(
            worker.execute_model,
            num_slots=SLOTS,
            block_size=BLOCK,
            num_blocks=BLOCKS,
            sample=worker.sample_tokens,
            vocab_size=VOCAB,
            sends_tokens=self.ranks[1] > 1,
            windows=windows,
        )

    @pytest.fixture
    def driver(self) -> Iterator[PlanDriver]:
        worker = self.boot()
        yield self.drive(worker)
        worker.shutdown()
        worker.shutdown()
