"""Choosing and checking the parts of an engine, and taking the choice to another process."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from typing import Any

import pytest

from pegboard.config import EngineConfig
from pegboard.contracts.executor import Executor
from pegboard.contracts.model_source import ModelNotFound
from pegboard.plugins import (
    CompositionError,
    ModelProvider,
    PluginError,
    PluginHost,
    RequestQueueProvider,
    SchedulerProvider,
    UnknownProviderError,
    compose,
    executor_class,
)
from pegboard.testing.plugins import compose_with
from pegboard.testing.pytest_plugin import PluginFactory

pytestmark = pytest.mark.usefixtures("standard")


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(**{"model": "tiny", **settings})


class TestDefaults:
    def test_every_part_is_chosen_with_a_reason(self) -> None:
        composition = compose(config())
        names = {kind: p.name for kind, p in composition.parts.items()}
        assert names == {
            "executor": "uniproc",
            "worker": "default",
            "platform": "cpu",
            "scheduler": "default",
            "request_queue": "fcfs",
            "admission_policy": "default",
            "chunk_policy": "default",
            "preemption_policy": "recompute",
            "kv_allocator": "prefix",
            "graph_runner": "default",
            "model": "tiny",
            "weight_loader": "dummy",
            "tokenizer": "hf",
            "sampler": "default",
        }
        assert set(composition.reasons) == set(names)
        assert composition.reasons["executor"] == "one rank"
        assert composition.reasons["request_queue"] == "scheduler.queue = 'fcfs'"
        assert composition.spec.max_model_len == 64
        assert composition.source.path == "/tiny"

    def test_the_choice_is_logged_once(self, caplog) -> None:
        caplog.set_level(logging.INFO, "pegboard.plugins")
        compose(config())
        (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
        assert "executor=uniproc (one rank)" in line
        assert "request_queue=fcfs" in line

    def test_it_is_frozen(self) -> None:
        with pytest.raises(AttributeError):
            compose(config()).config = None


class TestProblems:
    """Naming something that is not there is told before anything starts, and everything at once."""

    @pytest.mark.parametrize(
        ("settings", "path"),
        [
            ({"executor": {"name": "mpp"}}, "executor.name"),
            ({"executor": {"worker": "mpp"}}, "executor.worker"),
            ({"scheduler": {"name": "mpp"}}, "scheduler.name"),
            ({"scheduler": {"queue": "mpp"}}, "scheduler.queue"),
            ({"scheduler": {"admission": "mpp"}}, "scheduler.admission"),
            ({"scheduler": {"chunking": "mpp"}}, "scheduler.chunking"),
            ({"scheduler": {"preemption": "mpp"}}, "scheduler.preemption"),
            ({"kv_cache": {"allocator": "mpp"}}, "kv_cache.allocator"),
            ({"attention": {"backend": "flsh"}}, "attention.backend"),
            ({"sampling": {"sampler": "mpp"}}, "sampling.sampler"),
            ({"device": "mpp"}, "device"),
            ({"load_format": "mpp"}, "load_format"),
            ({"observability": {"stat_loggers": ["mpp"]}}, "observability.stat_loggers"),
        ],
    )
    def test_an_unknown_name_says_where(self, settings, path) -> None:
        with pytest.raises(UnknownProviderError, match=rf"^{path}: no \w+ is called '(mpp|flsh)'; available: '"):
            compose(config(**settings))

    def test_all_are_told_together(self) -> None:
        settings = {
            "model": "nothing-like-it",
            "executor": {"name": "uniproc", "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "scheduler": {"queue": "nix"},
            "attention": {"backend": "flsh"},
        }
        with pytest.raises(CompositionError) as caught:
            compose(config(**settings))
        problems = caught.value.problems
        assert len(problems) == 5
        for text in ("nothing-like-it", "'nix'", "'flsh'", "capability 'tp'", "capability 'pp'"):
            assert any(text in p for p in problems), text
            assert text in str(caught.value)

    def test_an_unknown_model_alone_is_model_not_found(self) -> None:
        with pytest.raises(ModelNotFound, match="nothing knows 'nix'"):
            compose(config(model="nix"))

    def test_without_any_resolver(self) -> None:
        host = PluginHost.load(extra={}, discovery=False)
        with pytest.raises(CompositionError, match="pip install pegboard-plugins"):
            compose(config(), host)

    def test_a_resolver_that_answers_nonsense(self) -> None:
        with pytest.raises(PluginError, match=r"plugin 'acme' .*returned 'a string' instead of a ModelSource"):
            compose_with({"resolve_model": lambda: "a string"})

    def test_a_resolver_that_fails(self) -> None:
        def resolve_model(ref):
            raise OSError("no network")

        with pytest.raises(PluginError, match=r"resolve_model of plugin 'acme'.*failed for 'tiny': OSError: no network"):
            compose_with({"resolve_model": resolve_model})

    @pytest.mark.parametrize(
        ("spec", "told"),
        [
            ("", "states no spec function"),
            ("fake_standard:nix", "has no attribute 'nix'"),
            ("builtins:repr", "instead of a ModelSpec"),
            ("fake_standard:Cpu.device_count", "ModelSpec"),
        ],
    )
    def test_a_model_without_a_usable_spec(self, spec, told) -> None:
        def models():
            return [ModelProvider(name="x", target="a:b", spec=spec, architectures=("TinyForCausalLM",))]

        with pytest.raises(PluginError, match=told):
            compose_with({"models": models})


class TestCapabilities:
    def test_what_a_part_requires_of_another(self) -> None:
        hooks = {
            "schedulers": lambda: [SchedulerProvider(name="x", target="a:b", requires={"kv_allocator.prefix_caching"})],
        }
        compose_with(hooks, scheduler={"name": "x"})
        with pytest.raises(CompositionError) as caught:
            compose_with(hooks, scheduler={"name": "x"}, kv_cache={"allocator": "paged"})
        (problem,) = caught.value.problems
        assert "scheduler 'x' of plugin 'acme'" in problem
        assert "needs capability 'prefix_caching' of the kv_allocator" in problem
        assert "one that has it: prefix" in problem


class Queue:
    """Takes what it names."""

    def __init__(self, options: Any, composition: Any, seed: int = 0) -> None:
        self.options, self.composition, self.seed = options, composition, seed

    def add(self, request): ...
    def prepend(self, request): ...
    def peek(self): ...
    def pop(self): ...
    def remove(self, request_id): ...
    def __len__(self): ...
    def __iter__(self): ...


class TestCreate:
    def test_a_constructor_gets_what_it_names(self) -> None:
        from pydantic import BaseModel

        class Options(BaseModel):
            limit: int = 3

        hooks = {"request_queues": lambda: [RequestQueueProvider(name="q", target=Queue, config=Options)]}
        composition = compose_with(hooks, scheduler={"queue": "q"}, plugins={"acme": {"limit": 4}})
        made = composition.create("request_queue", seed=5, unheard_of=1)
        assert (made.options, made.seed) == (Options(limit=4), 5)
        assert made.composition is composition

    @pytest.mark.parametrize("made", [object(), None])
    def test_what_a_factory_makes_is_checked(self, made) -> None:
        hooks = {"request_queues": lambda: [RequestQueueProvider(name="q", target=lambda: made)]}
        with pytest.raises(PluginError, match=r"request_queue 'q' of plugin 'acme'.*lacks"):
            compose_with(hooks, scheduler={"queue": "q"}).create("request_queue")

    def test_a_kind_that_was_not_chosen(self) -> None:
        with pytest.raises(PluginError, match="no attention was chosen"):
            compose(config()).create("attention")

    def test_a_part_that_cannot_be_loaded_names_its_plugin(self) -> None:
        with pytest.raises(PluginError, match=r"sampler 'default' of plugin 'standard' of pegboard-plugins .*'nowhere'"):
            compose(config()).create("sampler")


def test_executor_class(plugin_factory: PluginFactory) -> None:
    source = """
    from pegboard.contracts.executor import Executor
    from pegboard.plugins import ExecutorProvider, hookimpl
    class Mine(Executor):
        def _init_executor(self): ...
        def collective_rpc(self, method, args=(), kwargs=None, *, timeout=None, non_block=False, ranks="all"): ...
        def check_health(self): ...
        def register_failure_callback(self, callback): ...
        def _shutdown(self): ...
    @hookimpl
    def executors(): return [ExecutorProvider(name="mine", target=Mine)]
    """
    plugin_factory(source, name="acme")
    assert executor_class(config(executor={"name": "mine"})).__name__ == "Mine"
    assert Executor.get_class(config(executor={"name": "mine"})).__name__ == "Mine"
    assert executor_class(config(executor={"name": "acme:Mine"})).__name__ == "Mine"
    with pytest.raises(UnknownProviderError, match=r"executor\.name: no executor is called 'mpp'"):
        executor_class(config(executor={"name": "mpp"}))


PICKLED = """
import pickle, sys
composition = pickle.load(open(sys.argv[1], "rb"))
queue = composition.create("request_queue")
print(type(queue).__name__, composition.parts["request_queue"].plugin, composition.options("acme").limit,
      sorted(r.name for r in composition.host.records), sorted(composition.extensions), composition.config.scheduler.queue)
"""
PICKLABLE = """
from pydantic import BaseModel
from pegboard.contracts.request_queue import KeyedRequestQueue
from pegboard.plugins import RequestQueueProvider, EventSinkProvider, hookimpl
class Options(BaseModel):
    limit: int = 3
class Mine(KeyedRequestQueue):
    def key(self, request): return 0
@hookimpl
def request_queues(): return [RequestQueueProvider(name="mine", target=Mine, config="acme:Options")]
"""


class TestAnotherProcess:
    @pytest.fixture
    def composition(self, plugin_factory) -> Any:
        self.written = plugin_factory(PICKLABLE, name="acme")
        self.idle = plugin_factory("raise SystemExit", name="idle")
        return compose(config(scheduler={"queue": "mine"}, plugins={"acme": {"limit": 4}, "block": ["idle"]}))

    def test_it_is_the_same_after_pickling(self, composition) -> None:
        again = pickle.loads(pickle.dumps(composition))
        assert again.parts == composition.parts
        assert again.reasons == composition.reasons
        assert again.extensions == composition.extensions
        assert again.config == composition.config
        assert again.manifest == composition.manifest
        assert again.host is not composition.host
        assert again.options("acme") == composition.options("acme")

    def test_a_child_process_has_the_same_parts(self, composition, tmp_path, standard, path_of) -> None:
        (tmp_path / "pickled").write_bytes(pickle.dumps(composition))
        run = subprocess.run(
            [sys.executable, "-c", PICKLED, str(tmp_path / "pickled")],
            capture_output=True,
            text=True,
            env=path_of(standard, self.written, self.idle),
            timeout=60,
        )
        assert run.returncode == 0, run.stderr
        expected = "Mine acme 4 ['acme', 'standard'] ['event_sink', 'logits_processor', 'stat_logger', 'worker_extension'] mine"
        assert run.stdout.strip() == expected

    def test_a_child_that_lacks_the_plugin_refuses(self, composition, tmp_path, standard, path_of) -> None:
        (tmp_path / "pickled").write_bytes(pickle.dumps(composition))
        run = subprocess.run(
            [sys.executable, "-c", PICKLED, str(tmp_path / "pickled")],
            capture_output=True,
            text=True,
            env=path_of(standard),
            timeout=60,
        )
        assert run.returncode != 0
        assert "plugin 'acme' of acme 1.0 is not installed here" in run.stderr


def test_sections_that_strangers_claim_are_no_matter_of_other_parts(plugin_factory: PluginFactory) -> None:
    source = """
    from pydantic import BaseModel
    from pegboard.plugins import ConfigSection, hookimpl
    class Options(BaseModel): ...
    @hookimpl
    def config_sections():
        return {}
    """
    for name, answer in {
        "p1": "[ConfigSection('shared', Options)]",
        "p2": "[ConfigSection('shared', Options)]",
        "p3": "1 / 0",
    }.items():
        plugin_factory(source.format(answer), name=name, module=f"mod_{name}")
    composition = compose(config())
    assert composition.host.record("p3").loaded
    assert composition.options("standard") is None
    assert len(composition.create("request_queue")) == 0


def test_a_stranger_s_resolver_that_fails_hides_no_other_s(
    plugin_factory: PluginFactory, caplog: pytest.LogCaptureFixture
) -> None:
    source = """
    from pegboard.contracts.model_source import ModelSource
    from pegboard.plugins import hookimpl
    @hookimpl
    def resolve_model(ref, config):
        return {}
    """
    found = "ModelSource(ref, '/acme', 'dummy', 'hf', {'architectures': ['TinyForCausalLM']}) if ref == 'acme-tiny' else None"
    plugin_factory(source.format("1 / 0"), name="aaa", module="mod_aaa")
    plugin_factory(source.format(found), name="acme", module="mod_acme")
    assert compose(config(model="acme-tiny")).source.path == "/acme"
    assert "plugin 'aaa'" in caplog.text
    with pytest.raises(PluginError, match="resolve_model of plugin 'aaa'"):
        compose(config(model="nix"))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ModelProvider(name="x", target="a:b", architectures="LlamaForCausalLM"), "architectures must be a list"),
        (lambda: SchedulerProvider(name="x", target="a:b", requires={"tp"}), "write 'kind.capability'"),
    ],
)
def test_a_descriptor_that_could_never_match_is_refused(make: Any, told: str) -> None:
    with pytest.raises(PluginError, match=told):
        make()


def test_a_requirement_of_an_unknown_kind_is_told() -> None:
    hooks = {"schedulers": lambda: [SchedulerProvider(name="x", target="a:b", requires={"kv_alocator.prefix_caching"})]}
    with pytest.raises(CompositionError, match="'kv_alocator', which is no kind of part; did you mean 'kv_allocator'"):
        compose_with(hooks, scheduler={"name": "x"})
