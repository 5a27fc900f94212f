"""A stand-in for the standard parts, so that these tests need none of the real ones."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard.plugins import PluginHost
from pegboard.plugins.discovery import normalized
from pegboard.testing.distributions import WrittenDistribution, forget_modules, write_distribution

STANDARD = '''
from pegboard.contracts.attention import Support
from pegboard.contracts.event_sink import EventSink
from pegboard.contracts.logits_processor import LogitsProcessor
from pegboard.contracts.model import ModelSpec
from pegboard.contracts.model_source import ModelSource
from pegboard.contracts.platform import Platform
from pegboard.contracts.request_queue import KeyedRequestQueue
from pegboard.contracts.stat_logger import StatLogger
from pegboard.contracts.worker import WorkerExtension
from pegboard.plugins import *
from pegboard.plugins import hookimpl


class Queue(KeyedRequestQueue):
    def key(self, request):
        return request.arrival_time


class Cpu(Platform):
    name = device_type = "cpu"
    def is_available(): return True
    is_available = staticmethod(is_available)
    def device_count(self): return 1
    def set_device(self, local_rank, num_threads): return None
    def memory(self): return 0, 0
    def preferred_dtype(self, stated): return "float32"
    def synchronize(self): ...


class Extension(WorkerExtension):
    """Observes nothing."""


class Sink(EventSink):
    def emit(self, event): ...


class Processor(LogitsProcessor):
    def update_state(self, delta): ...
    def apply(self, logits, rows): return logits


class Logger(StatLogger):
    def record(self, scheduler, iteration): ...


class Torch:
    """Structural: keeps the attention contract without subclassing it."""
    name = "torch"
    graph_support = "never"
    kv_layout = ""
    def supports(query): return Support.of("no soft cap" if query.logits_soft_cap else None)
    supports = staticmethod(supports)
    def kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size): return (num_blocks,)
    kv_cache_shape = staticmethod(kv_cache_shape)
    def move_blocks(source, target, pairs): ...
    move_blocks = staticmethod(move_blocks)
    def build_metadata(self, common): return common
    def graph_metadata(self, num_rows, max_blocks): raise TypeError("no graphs")
    def refill(self, metadata, common): raise TypeError("no graphs")
    def forward(self, layer, query, key, value, kv_cache, metadata, out): return out


def spec(source):
    return ModelSpec(architecture="TinyForCausalLM", vocab_size=10, hidden_size=4, num_layers=4, num_heads=4, num_kv_heads=2,
                     head_size=1, max_model_len=64)


@hookimpl
def executors(): return [ExecutorProvider(name="uniproc", target="nowhere:Executor")]
@hookimpl
def workers(): return [WorkerProvider(name="default", target="nowhere:Worker")]
@hookimpl
def platforms(): return [PlatformProvider(name="cpu", target=Cpu)]
@hookimpl
def attention_backends(): return [AttentionBackendProvider(name="torch", target=Torch)]
@hookimpl
def graph_runners(): return [GraphRunnerProvider(name="default", target="nowhere:Graphs")]
@hookimpl
def schedulers(): return [SchedulerProvider(name="default", target="nowhere:Scheduler", capabilities={"async_steps"})]
@hookimpl
def request_queues(): return [RequestQueueProvider(name="fcfs", target=Queue)]
@hookimpl
def admission_policies(): return [AdmissionPolicyProvider(name="default", target="nowhere:Admission")]
@hookimpl
def chunk_policies(): return [ChunkPolicyProvider(name="default", target="nowhere:Chunk")]
@hookimpl
def preemption_policies(): return [PreemptionPolicyProvider(name="recompute", target="nowhere:Preemption")]
@hookimpl
def kv_allocators():
    return [KVAllocatorProvider(name="paged", target="nowhere:Paged"),
            KVAllocatorProvider(name="prefix", target="nowhere:Prefix", capabilities={"prefix_caching"})]
@hookimpl
def models():
    return [ModelProvider(name="tiny", target="nowhere:Tiny", spec="fake_standard:spec", architectures=("TinyForCausalLM",),
                          capabilities={"tp", "pp"})]
@hookimpl
def weight_loaders(): return [WeightLoaderProvider(name="dummy", target="nowhere:Dummy")]
@hookimpl
def tokenizers(): return [TokenizerProvider(name="hf", target="nowhere:HF")]
@hookimpl
def communicators(): return [CommunicatorProvider(name="gloo", target="nowhere:Gloo")]
@hookimpl
def samplers(): return [SamplerProvider(name="default", target="nowhere:Sampler")]
@hookimpl
def event_sinks(): return [EventSinkProvider(name="log", target="nowhere:Sink")]
@hookimpl
def stat_loggers(): return [StatLoggerProvider(name="log", target="nowhere:Logger")]
@hookimpl
def resolve_model(ref, config):
    if ref != "tiny":
        return None
    return ModelSource(ref=ref, path="/tiny", loader="dummy", tokenizer="hf", config={"architectures": ["TinyForCausalLM"]})
'''


def standard_version() -> str:
    """The installed one, so that the stand-in, which comes first on the path, differs from it in nothing that is checked."""
    try:
        return importlib.metadata.version("pegboard-plugins")
    except importlib.metadata.PackageNotFoundError:
        return "0.1.0"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PEGBOARD_PLUGINS_ALLOW", "PEGBOARD_PLUGINS_BLOCK", "PEGBOARD_CONFIG", "PEGBOARD_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _only_what_the_test_installs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optional packages that happen to be installed are not seen, so that the tests mean the same with and without them."""
    distributions, version = importlib.metadata.distributions, importlib.metadata.version

    def optional(dist: importlib.metadata.Distribution) -> bool:
        name = normalized(dist.metadata["Name"] or "")
        own = str(dist.locate_file("")).startswith(str(tmp_path))
        return name.startswith("pegboard-") and name != "pegboard-plugins" and not own

    def visible(**filters: Any) -> Iterator[importlib.metadata.Distribution]:
        return (dist for dist in distributions(**filters) if not optional(dist))

    def version_of(name: str) -> str:
        if all(optional(dist) for dist in distributions(name=name)):
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "distributions", visible)
    monkeypatch.setattr(importlib.metadata, "version", version_of)


@pytest.fixture
def standard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WrittenDistribution]:
    """The stand-in as a real distribution: ``pegboard-plugins`` with the entry point ``standard``."""
    site = tmp_path / "standard"
    points = {"standard": "fake_standard"}
    written = write_distribution(site, "pegboard-plugins", {"fake_standard": STANDARD}, points, version=standard_version())
    monkeypatch.syspath_prepend(str(site))
    yield written
    forget_modules(["fake_standard"])


@pytest.fixture
def path_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """Environment for a subprocess that sees these distributions, in this order."""

    def environment(*written: WrittenDistribution, **more: str) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": os.pathsep.join(str(w.folder) for w in written), **more}

    return environment


@pytest.fixture(autouse=True)
def _forget_written_modules(tmp_path: Path) -> Iterator[None]:
    """A later test may write a module of the same name."""
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def record_of(host: PluginHost, name: str) -> Any:
    """The record of one plugin; it must be there."""
    record = host.record(name)
    assert record is not None, f"{name}: {[r.name for r in host.records]}"
    return record


@pytest.fixture(name="record_of")
def _record_of() -> Callable[[PluginHost, str], Any]:
    return record_of
