"""Choosing and checking the parts of an engine, and taking the choice to another process."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from typing import Any

import pytest

from pegboard.config import EngineConfig
from pegboard.contracts.attention import AttentionQuery
from pegboard.contracts.model_source import ModelNotFound
from pegboard.plugins import (
    AttentionBackendProvider,
    CompositionError,
    DuplicateProviderError,
    ExecutorProvider,
    ModelProvider,
    PlatformProvider,
    PluginError,
    PluginHost,
    RequestQueueProvider,
    SchedulerProvider,
    UnknownProviderError,
    compose,
    executor_class,
    hookimpl,
    select_attention,
)

pytestmark = pytest.mark.usefixtures("standard")


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(**{"model": "tiny", **settings})


def with_plugin(hooks: dict[str, Any], **settings: Any) -> Any:
    plugin = type("Plugin", (), {name: staticmethod(hookimpl(function)) for name, function in hooks.items()})
    return compose(config(**settings), PluginHost.load(extra={"acme": plugin}))


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
    """B086: naming something that is not there is told before anything starts, and everything at once."""

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
            with_plugin({"resolve_model": lambda: "a string"})

    def test_a_resolver_that_fails(self) -> None:
        def resolve_model(ref):
            raise OSError("no network")

        with pytest.raises(PluginError, match=r"resolve_model of plugin 'acme'.*failed for 'tiny': OSError: no network"):
            with_plugin({"resolve_model": resolve_model})

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
            with_plugin({"models": models})


class TestExecutorAuto:
    def offers(self, *names: str) -> dict[str, Any]:
        return {"executors": lambda: [ExecutorProvider(name=n, target="a:b", capabilities={"tp", "pp"}) for n in names]}

    def test_several_ranks_without_an_executor_for_them(self) -> None:
        with pytest.raises(PluginError, match=r"2 x 1 ranks .* need an executor with tp.*pip install pegboard-executor-mp"):
            compose(config(executor={"tensor_parallel_size": 2}))

    def test_several_ranks(self) -> None:
        composition = with_plugin(self.offers("zeta", "mp"), executor={"pipeline_parallel_size": 2})
        assert composition.parts["executor"].name == "mp"
        assert "1 x 2 ranks" in composition.reasons["executor"]

    def test_one_rank_stays_in_process(self) -> None:
        assert with_plugin(self.offers("mp")).parts["executor"].name == "uniproc"

    def test_an_installed_one_of_a_stranger_is_not_taken_but_told(self, plugin_factory) -> None:
        source = "from pegboard.plugins import *\nfrom pegboard.plugins import hookimpl\n@hookimpl\ndef executors():\n"
        plugin_factory(source + "    return [ExecutorProvider(name='threads', target='a:b', capabilities={'tp'})]", name="acme")
        with pytest.raises(PluginError, match="installed but not enabled: threads"):
            compose(config(executor={"tensor_parallel_size": 2}))
        named = compose(config(executor={"tensor_parallel_size": 2, "name": "threads"}))
        assert named.parts["executor"].plugin == "acme"
        enabled = compose(config(executor={"tensor_parallel_size": 2}, plugins={"enabled": ["acme"]}))
        assert enabled.parts["executor"].plugin == "acme"


class TestCapabilities:
    def test_what_a_part_requires_of_another(self) -> None:
        hooks = {
            "schedulers": lambda: [SchedulerProvider(name="x", target="a:b", requires={"kv_allocator.prefix_caching"})],
        }
        with_plugin(hooks, scheduler={"name": "x"})
        with pytest.raises(CompositionError) as caught:
            with_plugin(hooks, scheduler={"name": "x"}, kv_cache={"allocator": "paged"})
        (problem,) = caught.value.problems
        assert "scheduler 'x' of plugin 'acme'" in problem
        assert "needs capability 'prefix_caching' of the kv_allocator" in problem
        assert "one that has it: prefix" in problem


class TestModels:
    def offer(self) -> dict[str, Any]:
        return {
            "models": lambda: [
                ModelProvider(name="mine", target="a:b", spec="fake_standard:spec", architectures=("TinyForCausalLM",))
            ]
        }

    SOURCE = (
        "from pegboard.plugins import *\nfrom pegboard.plugins import hookimpl\n@hookimpl\ndef models():\n"
        "    return [ModelProvider(name='mine', target='a:b', spec='fake_standard:spec', architectures=('TinyForCausalLM',))]"
    )

    def test_an_installed_plugin_does_not_take_an_architecture_over(self, plugin_factory) -> None:
        plugin_factory(self.SOURCE, name="acme")
        assert compose(config()).parts["model"].plugin == "standard"

    def test_an_enabled_one_does(self, plugin_factory) -> None:
        plugin_factory(self.SOURCE, name="acme")
        assert compose(config(plugins={"enabled": ["acme"]})).parts["model"].plugin == "acme"

    def test_two_enabled_ones_are_an_error(self, plugin_factory) -> None:
        plugin_factory(self.SOURCE, name="acme")
        plugin_factory(self.SOURCE, name="beta")
        with pytest.raises(DuplicateProviderError, match=r"acme 1\.0 and 'beta:mine' of plugin 'beta' of beta 1\.0"):
            compose(config(plugins={"enabled": ["acme", "beta"]}))


class TestPlatforms:
    def platform(self, name: str, available: Any, priority: int = 9) -> dict[str, Any]:
        import fake_standard

        return (
            {"platforms": lambda: [PlatformProvider(name=name, priority=priority, target=made)]}
            if (made := type(name, (fake_standard.Cpu,), {"is_available": staticmethod(available)}))
            else {}
        )

    @pytest.fixture(autouse=True)
    def _loaded(self) -> None:
        PluginHost.load()

    def test_an_unavailable_one_is_passed_over_with_a_reason(self) -> None:
        composition = with_plugin(self.platform("npu", lambda: False))
        assert composition.parts["platform"].name == "cpu"
        assert "npu is not available" in composition.reasons["platform"]

    def test_a_failing_one_is_passed_over_with_a_warning(self, caplog) -> None:
        def broken():
            raise RuntimeError("boom-17")

        assert with_plugin(self.platform("npu", broken)).parts["platform"].name == "cpu"
        (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert "'npu'" in warning
        assert "boom-17" in warning

    def test_a_named_one_that_is_unavailable_is_an_error(self) -> None:
        with pytest.raises(PluginError, match=r"device: platform 'npu' of plugin 'acme'.* is not available on this machine"):
            with_plugin(self.platform("npu", lambda: False), device="npu")

    def test_a_named_one_that_fails_keeps_its_exception(self) -> None:
        def broken():
            raise RuntimeError("boom-17")

        with pytest.raises(PluginError, match="boom-17"):
            with_plugin(self.platform("npu", broken), device="npu")


class TestAttention:
    QUERY = AttentionQuery("cpu", "float32", "float32", 1, 1, 4, 16)

    def offer(self, supports: Any, priority: int = 9, name: str = "mine") -> dict[str, Any]:
        import fake_standard

        backend = type("Mine", (fake_standard.Torch,), {"supports": staticmethod(supports)})
        return {"attention_backends": lambda: [AttentionBackendProvider(name=name, target=backend, priority=priority)]}

    @pytest.fixture(autouse=True)
    def _loaded(self) -> None:
        PluginHost.load()

    def test_highest_priority_that_supports(self) -> None:
        from pegboard.contracts.attention import Support

        choice = select_attention(self.QUERY, with_plugin(self.offer(lambda q: Support(True))))
        assert choice.provider.name == "mine"
        assert choice.reasons == ("mine: supports the query, priority 9", "torch: supports the query, priority 0")
        choice = select_attention(self.QUERY, with_plugin(self.offer(lambda q: Support.of("head size 4 is too small"))))
        assert choice.provider.name == "torch"
        assert "mine: head size 4 is too small" in choice.reasons

    def test_a_named_one_that_does_not_support_is_an_error_with_its_reasons(self) -> None:
        from pegboard.contracts.attention import Support

        composition = with_plugin(self.offer(lambda q: Support.of("no", "never")), attention={"backend": "mine"})
        with pytest.raises(CompositionError) as caught:
            select_attention(self.QUERY, composition)
        assert len(caught.value.problems) == 2
        assert "plugin 'acme'" in str(caught.value)

    def test_a_failing_one_is_passed_over_with_a_warning_but_not_if_named(self, caplog) -> None:
        def supports(query):
            raise RuntimeError("boom-17")

        assert select_attention(self.QUERY, with_plugin(self.offer(supports))).provider.name == "torch"
        assert any("boom-17" in r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
        with pytest.raises(PluginError, match="boom-17"):
            select_attention(self.QUERY, with_plugin(self.offer(supports), attention={"backend": "mine"}))

    def test_a_stranger_s_backend_is_not_taken_unless_enabled_or_named(self, plugin_factory) -> None:
        source = "from pegboard.plugins import *\nfrom pegboard.plugins import hookimpl\n@hookimpl\ndef attention_backends():\n"
        source += "    return [AttentionBackendProvider(name='mine', target='fake_standard:Torch', priority=99)]"
        plugin_factory(source, name="acme")
        assert select_attention(self.QUERY, compose(config())).provider.name == "torch"
        for settings in ({"plugins": {"enabled": ["acme"]}}, {"attention": {"backend": "mine"}}):
            assert select_attention(self.QUERY, compose(config(**settings))).provider.name == "mine"


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
        composition = with_plugin(hooks, scheduler={"queue": "q"}, plugins={"acme": {"limit": 4}})
        made = composition.create("request_queue", seed=5, unheard_of=1)
        assert (made.options, made.seed) == (Options(limit=4), 5)
        assert made.composition is composition

    def test_a_kind_that_was_not_chosen(self) -> None:
        with pytest.raises(PluginError, match="no attention was chosen"):
            compose(config()).create("attention")

    def test_a_part_that_cannot_be_loaded_names_its_plugin(self) -> None:
        with pytest.raises(PluginError, match=r"sampler 'default' of plugin 'standard' of pegboard-plugins .*'nowhere'"):
            compose(config()).create("sampler")


def test_executor_class(plugin_factory) -> None:
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
        expected = "Mine acme 4 ['acme', 'standard'] ['event_sink', 'stat_logger', 'worker_extension'] mine"
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
