from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pegboard.contracts.worker import WorkerExtension, rpc
from pegboard.engine.bootstrap import prepare
from pegboard.plugins import WorkerExtensionProvider, hookimpl
from pegboard.testing.conformance.worker import WorkerConformance, continuation
from pegboard.testing.plan_driver import PlanDriver, bitmask
from pegboard.testing.scripted_model import ScriptedPlugin
from pegboard.wire import GrammarOutput, KVCacheConfig, KVCacheGroup, World
from pegboard_plugins.worker import dummy_step
from pegboard_plugins.worker import worker as worker_module
from pegboard_plugins.worker.prompt_logprobs import POSITIONS_AT_ONCE
from pegboard_plugins.worker.worker import StandardWorker


class TestStandardWorker(WorkerConformance):
    worker = "default"


class Watcher(WorkerExtension):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_model_loaded(self, model: Any) -> None:
        self.seen.append("model")

    def on_memory_profile(self) -> int:
        self.seen.append("memory")
        return 1000

    def before_forward(self, plan: Any) -> None:
        self.seen.append("before")

    def after_forward(self, plan: Any, hidden: Any) -> None:
        self.seen.append(f"after {len(hidden)}")

    def after_sample(self, plan: Any, output: Any) -> None:
        self.seen.append(f"sampled {sum(map(len, output.sampled_token_ids))}")

    @rpc("watch")
    def count(self) -> int:
        return len(self.seen)


class WatcherPlugin(ScriptedPlugin):
    def __init__(self) -> None:
        super().__init__(max_model_len=64)
        self.told: list[str] = []

    @hookimpl
    def worker_extensions(self) -> Any:
        yield WorkerExtensionProvider(name="watcher", target=Watcher)

    @hookimpl
    def worker_starting(self, context: Any) -> None:
        self.told.append(f"starting {context.world.rank}")

    @hookimpl
    def worker_stopping(self, context: Any) -> None:
        self.told.append("stopping")


def boot(plugin: ScriptedPlugin | None = None, blocks: int = 20, **settings: Any) -> StandardWorker:
    settings = {"executor": {"num_threads": 1}, "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 32}, **settings}
    name = {"plugins": {"scripted": plugin or ScriptedPlugin(max_model_len=64), "enabled": ["scripted"]}}
    worker: StandardWorker = prepare(model="scripted", **name, **settings).composition.create("worker", world=World())
    worker.init_device()
    worker.load_model()
    if blocks:
        specs = worker.get_kv_cache_specs()
        group = KVCacheGroup(layers=list(specs), spec=next(iter(specs.values())))
        worker.initialize_cache(KVCacheConfig(num_blocks=blocks, groups=[group]))
        worker.compile_or_warm_up()
    return worker


@pytest.fixture
def worker() -> Iterator[StandardWorker]:
    worker = boot()
    yield worker
    worker.shutdown()


def drive(worker: StandardWorker) -> PlanDriver:
    return PlanDriver(worker.execute_model, num_slots=4, block_size=16, num_blocks=20)


def test_hooks_and_extensions_are_called_in_order() -> None:
    plugin = WatcherPlugin()
    worker = boot(plugin)
    watcher = worker.extensions["watcher"]
    assert isinstance(watcher, Watcher)
    worker.determine_available_memory()
    driver = drive(worker)
    driver.add("a", [1, 2, 3])
    driver.step({"a": 2})
    driver.step({"a": 1})
    assert watcher.seen == ["model", "memory", "before", "after 2", "sampled 0", "before", "after 1", "sampled 1"]
    worker.shutdown()
    worker.shutdown()
    assert plugin.told == ["starting 0", "stopping"]


def test_default_budget_follows_the_requests_and_what_extensions_book() -> None:
    report = boot(WatcherPlugin(), blocks=0).determine_available_memory()
    spec = boot(blocks=0).get_kv_cache_specs()["scripted"]
    assert report.available == (4 * 64 // 16 + 1) * spec.block_bytes, report.reason
    assert "4 requests of 64 tokens" in report.reason
    assert report.resident > report.activations >= 0


def test_what_forks_and_prompt_logprobs_take_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = boot(ScriptedPlugin(max_model_len=64, vocab_size=300), scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 100})
    model, sizes, copied = worker.runner.model, [], []
    compute = model.compute_logits
    monkeypatch.setattr(model, "compute_logits", lambda hidden: sizes.append(len(hidden)) or compute(hidden))
    monkeypatch.setattr(dummy_step, "copy_for_forks", lambda logits: copied.append(logits.shape))
    worker.determine_available_memory()
    assert (sizes, copied) == ([4, POSITIONS_AT_ONCE], [(4, 300)])


def test_threads_are_set() -> None:
    boot(blocks=0, executor={"num_threads": 1})
    assert torch.get_num_threads() == 1


def test_vocab_limit_hides_ids(worker: StandardWorker) -> None:
    driver = drive(worker)
    driver.add("a", [1, 2, 3])
    unlimited = driver.step({"a": 3})["a"]
    worker.set_vocab_limit(unlimited)
    driver.add("b", [1, 2, 3])
    assert driver.step({"b": 3})["b"] == 0  # the others are equal
    worker.set_vocab_limit(10**9)
    assert worker.runner.batch.vocab_limit == 257
    with pytest.raises(ValueError, match="leaves no token"):
        worker.set_vocab_limit(0)


def test_sleep_gives_the_cache_back_and_wake_brings_it(worker: StandardWorker) -> None:
    driver = drive(worker)
    driver.add("a", [1, 2, 3])
    driver.generate(2)
    with pytest.raises(RuntimeError, match="1 requests are running"):
        worker.sleep(1)
    driver.finish("a")
    worker.execute_model(driver.plan({}))
    for level, tags in ((1, None), (2, None), (2, ["kv_cache", "weights"])):
        worker.sleep(level)
        assert worker.runner.cache is not None
        assert not worker.runner.cache.device_caches
        worker.wake_up(tags)
        driver.add("b", [1, 2, 3])
        assert driver.generate(2)["b"] == continuation([1, 2, 3], 2, worker.runner.model.next_token)  # type: ignore[attr-defined]
        driver.finish("b")
        worker.execute_model(driver.plan({}))
    with pytest.raises(ValueError, match="neither 1"):
        worker.sleep(3)
    with pytest.raises(ValueError, match="lora is none of"):
        worker.wake_up(["lora"])


def test_extensions_are_told_of_the_model_made_on_waking() -> None:
    worker = boot(WatcherPlugin())
    watcher = worker.extensions["watcher"]
    assert isinstance(watcher, Watcher)
    for level, times in ((1, 1), (2, 2), (2, 3)):
        worker.sleep(level)
        worker.wake_up(None)
        assert watcher.seen.count("model") == times
    worker.shutdown()


def test_cores_are_shared_with_the_ranks_of_the_same_host(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(worker_module, "threads_per_worker", lambda configured, local: asked.append(local) or 1)
    monkeypatch.setattr(worker_module, "Links", lambda *_: SimpleNamespace(close=lambda: None))
    composition = prepare(model="scripted", plugins={"scripted": ScriptedPlugin()}).composition
    for world in (World(tp_size=4), World(tp_size=4, local_size=2)):
        worker = composition.create("worker", world=world)
        worker.init_device()
        worker.shutdown()
    assert asked == [4, 2]


def test_timings_are_counted_while_asked(worker: StandardWorker) -> None:
    driver = drive(worker)
    driver.add("a", [1, 2, 3])
    driver.step({"a": 3})
    assert worker.record_timings(True)["steps"] == 0
    driver.step({"a": 1})
    driver.step({"a": 1})
    found = worker.record_timings(False)
    assert (found["steps"], found["rows"], found["tokens"]) == (2, 2, 2)
    assert all(found[stage] > 0 for stage in ("prepare", "metadata", "forward", "sample", "finish"))
    driver.step({"a": 1})
    assert worker.record_timings(False)["steps"] == 0


def test_a_step_is_finished_before_the_next(worker: StandardWorker) -> None:
    driver = drive(worker)
    driver.add("a", [1, 2, 3])
    plan = driver.plan({"a": 3}, grammars=["a"])
    assert worker.execute_model(plan) is None
    with pytest.raises(ValueError, match="step 1 waits for its second half"):
        worker.execute_model(driver.plan({}))
    mask = GrammarOutput(step_id=1, slots=plan.slots, bitmask=bitmask([5], 257))
    assert worker.sample_tokens(mask).sampled_token_ids == [[5]]
    with pytest.raises(ValueError, match="no step waits for its second half"):
        worker.sample_tokens(mask)


def test_layers_without_a_group_are_refused(worker: StandardWorker) -> None:
    spec = worker.get_kv_cache_specs()["scripted"]
    with pytest.raises(ValueError, match=r"no group for the layers \['scripted'\]"):
        worker.initialize_cache(KVCacheConfig(num_blocks=4, groups=[KVCacheGroup(layers=["x"], spec=spec)]))


def test_methods_that_it_lacks_say_so(worker: StandardWorker) -> None:
    with pytest.raises(RuntimeError, match="StandardWorker does not offer add_lora"):
        worker.add_lora("a", "b")


def test_warm_up_leaves_the_null_block_clean(worker: StandardWorker) -> None:
    assert worker.runner.cache is not None
    for cache in worker.runner.cache.device_caches.values():
        cache[0].fill_(float("nan"))
    worker.compile_or_warm_up()
    assert all(not cache[0].any() for cache in worker.runner.cache.device_caches.values())
