"""One test per hook, first half: the hooks that offer parts, and those that decide where the configuration says "auto".

The name ``test_hook_<name>`` is demanded by tests/docs/test_hooks_documented.py.
"""

from __future__ import annotations

import types
from typing import Any

import pytest

from pegboard.config import EngineConfig
from pegboard.contracts.attention import AttentionQuery
from pegboard.contracts.model_source import ModelSource
from pegboard.plugins import (
    KINDS,
    CommunicatorProvider,
    CompositionError,
    ExecutorProvider,
    GrammarProvider,
    PlatformProvider,
    PluginError,
    PluginHost,
    compose,
    select_attention,
)
from pegboard.plugins.class_path import provider_class
from pegboard.testing.plugins import make_plugin
from pegboard.testing.pytest_plugin import PluginFactory

pytestmark = pytest.mark.usefixtures("standard")


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(model="tiny", **settings)


def offering(kind: str, *names: str, **fields: Any) -> types.FunctionType:
    provider = provider_class(kind)
    return lambda: [provider(name=n, target="nowhere:Part", **fields) for n in names]


def composed(hooks: dict[str, Any], **settings: Any) -> Any:
    """A composition with one plugin given directly, which makes it active."""
    host = PluginHost.load(extra={"acme": make_plugin(**hooks)})
    return compose(config(**settings), host)


# -- parts -------------------------------------------------------------------------------------------------------------

CHOSEN_BY = {
    "executor": {"executor": {"name": "mine"}},
    "worker": {"executor": {"worker": "mine"}},
    "scheduler": {"scheduler": {"name": "mine"}},
    "request_queue": {"scheduler": {"queue": "mine"}},
    "admission_policy": {"scheduler": {"admission": "mine"}},
    "chunk_policy": {"scheduler": {"chunking": "mine"}},
    "preemption_policy": {"scheduler": {"preemption": "mine"}},
    "kv_allocator": {"kv_cache": {"allocator": "mine"}},
    "graph_runner": {"compilation": {"graph_runner": "mine"}},
    "weight_loader": {"load_format": "mine"},
    "sampler": {"sampling": {"sampler": "mine"}},
}


def part_is_chosen_by_name_alone(kind: str) -> None:
    hook = {KINDS[kind].hook: offering(kind, "mine")}
    assert composed(hook, **CHOSEN_BY[kind]).parts[kind].plugin == "acme"
    assert composed(hook).parts[kind].plugin == "standard"


def test_hook_executors() -> None:
    part_is_chosen_by_name_alone("executor")


def test_hook_workers() -> None:
    part_is_chosen_by_name_alone("worker")


def test_hook_graph_runners() -> None:
    part_is_chosen_by_name_alone("graph_runner")


def test_hook_schedulers() -> None:
    part_is_chosen_by_name_alone("scheduler")


def test_hook_request_queues() -> None:
    part_is_chosen_by_name_alone("request_queue")


def test_hook_admission_policies() -> None:
    part_is_chosen_by_name_alone("admission_policy")


def test_hook_chunk_policies() -> None:
    part_is_chosen_by_name_alone("chunk_policy")


def test_hook_preemption_policies() -> None:
    part_is_chosen_by_name_alone("preemption_policy")


def test_hook_kv_allocators() -> None:
    part_is_chosen_by_name_alone("kv_allocator")


def test_hook_weight_loaders() -> None:
    part_is_chosen_by_name_alone("weight_loader")


def test_hook_samplers() -> None:
    part_is_chosen_by_name_alone("sampler")


def test_hook_communicators() -> None:
    def communicators() -> list[CommunicatorProvider]:
        return [
            CommunicatorProvider(name="slow", target="nowhere:Slow", priority=1),
            CommunicatorProvider(name="fast", target="nowhere:Fast", priority=2),
            CommunicatorProvider(name="npu", target="nowhere:Npu", priority=3, devices=("npu",)),
        ]

    def executors() -> list[ExecutorProvider]:
        return [ExecutorProvider(name="two", target="nowhere:Two", capabilities=frozenset({"tp"}))]

    hooks = {"communicators": communicators, "executors": executors}
    two: dict[str, Any] = {"name": "two", "tensor_parallel_size": 2}
    assert "communicator" not in composed(hooks).parts, "one rank needs none"
    assert composed(hooks, executor=two).parts["communicator"].name == "fast"
    assert composed(hooks, executor={**two, "communicator": "slow"}).parts["communicator"].name == "slow"
    assert composed({"executors": executors}, executor=two).parts["communicator"].name == "gloo"
    npu = PlatformProvider(name="npu", target="fake_standard:Cpu", priority=90)
    with pytest.raises(PluginError, match="none serves ranks on 'npu'; installed are gloo"):
        composed({"executors": executors, "platforms": lambda: [npu]}, executor=two)
    with pytest.raises(PluginError, match=r"executor\.communicator: no communicator is called 'nix'"):
        composed(hooks, executor={"communicator": "nix"})


def test_communicators_of_ranks_that_turn_out_to_be_on_several_hosts() -> None:
    two = {"name": "several", "tensor_parallel_size": 2}

    def executors() -> list[ExecutorProvider]:
        return [ExecutorProvider(name="several", target="nowhere:Several", capabilities=frozenset({"tp"}))]

    def communicators() -> list[CommunicatorProvider]:
        return [
            CommunicatorProvider(name="near", target="nowhere:Near", priority=9, one_host=True),
            CommunicatorProvider(name="far", target="nowhere:Far", priority=5),
        ]

    hooks = {"communicators": communicators, "executors": executors}
    chosen = composed(hooks, executor=two)
    assert chosen.parts["communicator"].name == "near"
    assert chosen.across_hosts().parts["communicator"].name == "far"
    assert chosen.parts["communicator"].name == "near", "it is another composition"
    assert chosen.across_hosts().across_hosts().parts == chosen.across_hosts().parts
    with pytest.raises(PluginError, match=r"executor\.communicator: 'near' is for ranks on one host, .*; name 'far', or 'auto'"):
        composed(hooks, executor={**two, "communicator": "near"}).across_hosts()
    alone = composed(hooks)
    assert alone.across_hosts() is alone


def test_hook_platforms() -> None:
    from pegboard.plugins import PlatformProvider

    hooks = {"platforms": lambda: [PlatformProvider(name="mine", target="fake_standard:Cpu", priority=9)]}
    assert composed(hooks).parts["platform"].name == "mine"
    assert composed(hooks, device="cpu").parts["platform"].name == "cpu"


def test_hook_tokenizers() -> None:
    def resolve_model(ref):
        return ModelSource(ref, "/x", "dummy", "mine", {"architectures": ["TinyForCausalLM"]})

    hooks = {"tokenizers": offering("tokenizer", "mine"), "resolve_model": resolve_model}
    assert composed(hooks).parts["tokenizer"].plugin == "acme"
    with pytest.raises(PluginError, match="no tokenizer is called 'mine'"):
        composed({"resolve_model": resolve_model})


def test_hook_models() -> None:
    other = offering("model", "other", architectures=("OtherForCausalLM",), spec="fake_standard:spec")
    assert composed({"models": other}).parts["model"].plugin == "standard"

    def resolve_model(ref):
        return ModelSource(ref, "/x", "dummy", "hf", {"architectures": ["OtherForCausalLM"]})

    composition = composed({"models": other, "resolve_model": resolve_model})
    assert composition.parts["model"].name == "other"
    assert composition.spec.vocab_size == 10
    with pytest.raises(PluginError, match=r"OtherForCausalLM\); supported: TinyForCausalLM"):
        composed({"resolve_model": resolve_model})


def query(**changes: Any) -> AttentionQuery:
    fields = {"device": "cpu", "dtype": "float32", "kv_dtype": "float32", "num_heads": 1, "num_kv_heads": 1, "head_size": 4}
    return AttentionQuery(**{**fields, "block_size": 16, **changes})


def attention(*offers: tuple[str, int]) -> Any:
    from pegboard.plugins import AttentionBackendProvider

    return lambda: [AttentionBackendProvider(name=n, target="fake_standard:Torch", priority=p) for n, p in offers]


def test_hook_attention_backends() -> None:
    hooks = {"attention_backends": attention(("mine", 5))}
    assert select_attention(query(), composed(hooks)).provider.name == "mine"
    assert select_attention(query(), composed(hooks, attention={"backend": "torch"})).provider.name == "torch"


def rides_along(plugin_factory: PluginFactory, kind: str, target: str) -> None:
    """Installed alone it is off; on with its plugin in ``plugins.enabled``, or with its plugin given directly."""
    provider, hook = provider_class(kind).__name__, KINDS[kind].hook
    source = f"""
    from pegboard.plugins import {provider}, hookimpl
    @hookimpl
    def {hook}(): return [{provider}(name="mine", target="fake_standard:{target}")]
    """
    plugin_factory(source, name="acme")
    assert compose(config()).create_all(kind) == {}
    made = compose(config(plugins={"enabled": ["acme"]})).create_all(kind)
    assert {name: type(part).__name__ for name, part in made.items()} == {"mine": target}
    given = {hook: lambda: [provider_class(kind)(name="direct", target=f"fake_standard:{target}")]}
    assert list(composed(given).create_all(kind)) == ["direct"]


def test_hook_worker_extensions(plugin_factory: PluginFactory) -> None:
    rides_along(plugin_factory, "worker_extension", "Extension")


def test_hook_event_sinks(plugin_factory: PluginFactory) -> None:
    rides_along(plugin_factory, "event_sink", "Sink")
    assert list(compose(config(observability={"event_sinks": ["mine"]})).create_all("event_sink")) == ["mine"]
    with pytest.raises(PluginError, match=r"observability\.event_sinks: no event_sink is called 'nix'"):
        compose(config(observability={"event_sinks": ["nix"]}))


def test_hook_stat_loggers(plugin_factory: PluginFactory) -> None:
    rides_along(plugin_factory, "stat_logger", "Logger")
    assert list(compose(config(observability={"stat_loggers": ["mine"]})).create_all("stat_logger")) == ["mine"]


def test_hook_logits_processors(plugin_factory: PluginFactory) -> None:
    source = """
    from pegboard.plugins import LogitsProcessorProvider, hookimpl
    @hookimpl
    def logits_processors(): return [LogitsProcessorProvider(name="mine", target="fake_standard:Processor")]
    """
    plugin_factory(source, name="acme")
    assert compose(config(plugins={"enabled": ["acme"]})).create_all("logits_processor") == {}, "it changes results: by name only"
    named = compose(config(sampling={"logits_processors": ["mine"]}))
    assert list(named.create_all("logits_processor")) == ["mine"]
    with pytest.raises(PluginError, match=r"sampling\.logits_processors: no logits_processor is called 'nix'"):
        compose(config(sampling={"logits_processors": ["nix"]}))


def test_hook_grammars() -> None:
    def grammars() -> list[GrammarProvider]:
        return [GrammarProvider(name=n, target="nowhere:Grammars", priority=p) for n, p in (("low", 1), ("high", 2))]

    assert "grammar" not in compose(config()).parts, "an engine needs none until a request does"
    assert composed({"grammars": grammars}).parts["grammar"].name == "high"
    assert composed({"grammars": grammars}, structured_outputs={"backend": "low"}).parts["grammar"].name == "low"
    with pytest.raises(PluginError, match=r"structured_outputs\.backend: no grammar is called 'nix'"):
        compose(config(structured_outputs={"backend": "nix"}))


def test_two_observers_of_one_name_are_both_made(plugin_factory: PluginFactory) -> None:
    source = "from pegboard.plugins import *\nfrom pegboard.plugins import hookimpl\n@hookimpl\ndef event_sinks():\n"
    source += "    return [EventSinkProvider(name='mine', target='fake_standard:Sink')]\n"
    for name in ("acme", "beta"):
        plugin_factory(source, name=name)
    made = compose(config(plugins={"enabled": ["beta", "acme"]})).create_all("event_sink")
    assert list(made) == ["beta:mine", "acme:mine"]


# -- who decides "auto" ------------------------------------------------------------------------------------------------


def settles_auto(kind: str, setting: dict[str, Any]) -> None:
    """The answer counts for "auto" alone, must be a candidate, and None leaves the default."""
    hook = {
        "executor": "select_executor",
        "scheduler": "select_scheduler",
        "preemption_policy": "select_preemption_policy",
        "kv_allocator": "select_kv_allocator",
    }[kind]
    seen: list[Any] = []

    def select(config, candidates):
        seen.append((config, dict(candidates)))
        return "mine"

    offers = {KINDS[kind].hook: offering(kind, "mine")}
    composition = composed({**offers, hook: select})
    assert composition.parts[kind].name == "mine"
    assert hook in composition.reasons[kind]
    assert "acme" in composition.reasons[kind]
    assert seen[0][0].model == "tiny"
    assert seen[0][1]["mine"].plugin == "acme"
    default = composed({**offers, hook: lambda: None}).parts[kind]
    assert default.plugin == "standard"
    assert composed({**offers, hook: select}, **setting).parts[kind].name == default.name
    with pytest.raises(PluginError, match=f"{hook} of plugin 'acme'.* chose 'nix', which is no candidate"):
        composed({hook: lambda: "nix"})

    def failing():
        raise RuntimeError("boom-17")

    with pytest.raises(PluginError, match=f"{hook} failed in plugin 'acme'.*boom-17"):
        composed({hook: failing})


def test_hook_select_executor() -> None:
    settles_auto("executor", {"executor": {"name": "uniproc"}})


def test_hook_select_scheduler() -> None:
    settles_auto("scheduler", {"scheduler": {"name": "default"}})


def test_hook_select_preemption_policy() -> None:
    settles_auto("preemption_policy", {"scheduler": {"preemption": "recompute"}})


def test_hook_select_kv_allocator() -> None:
    settles_auto("kv_allocator", {"kv_cache": {"allocator": "prefix"}})


def test_hook_select_attention_backend() -> None:
    seen: list[Any] = []

    def select(query, candidates):
        seen.append((query, list(candidates)))
        return "slow"

    hooks = {"attention_backends": attention(("slow", -1), ("quick", 5)), "select_attention_backend": select}
    choice = select_attention(query(), composed(hooks))
    assert choice.provider.name == "slow"
    assert "select_attention_backend of plugin 'acme'" in choice.reasons[0]
    assert seen == [(query(), ["quick", "slow", "torch"])]
    hooks["select_attention_backend"] = lambda query: "nix"
    with pytest.raises(PluginError, match="'nix', which is no candidate"):
        select_attention(query(), composed(hooks))
    with pytest.raises(CompositionError, match="torch: no soft cap"):
        select_attention(query(logits_soft_cap=30.0), composed({}))


DECIDER = """
from pegboard.plugins import *
from pegboard.plugins import hookimpl
@hookimpl
def request_queues(): return [RequestQueueProvider(name="mine", target="nowhere:Queue")]
@hookimpl
def schedulers(): return [SchedulerProvider(name="mine", target="nowhere:Scheduler")]
@hookimpl
def select_scheduler(config, candidates): return "mine"
@hookimpl
def select_executor(config, candidates): raise RuntimeError("asked")
called = []
@hookimpl
def validate_request(request): called.append(request)
"""


def test_deciding_hooks_of_a_merely_installed_plugin_change_nothing(plugin_factory: PluginFactory) -> None:
    plugin_factory(DECIDER, name="acme")
    assert compose(config()).parts["scheduler"].name == "default"
    # Using one of its parts is not asking it for decisions either.
    assert compose(config(scheduler={"queue": "mine"})).parts["scheduler"].name == "default"
    host = PluginHost.load()
    host.activate("acme")
    assert compose(config(), host).parts["scheduler"].name == "default"
    with pytest.raises(PluginError, match="asked"):
        compose(config(plugins={"enabled": ["acme"]}))


def test_deciding_hooks_of_pegboard_s_own_packages_count_once_installed(plugin_factory: PluginFactory) -> None:
    plugin_factory(DECIDER.replace('raise RuntimeError("asked")', "pass"), name="pegboard-executor-mp", entry_point="mp")
    assert compose(config()).parts["scheduler"].name == "mine"


def test_observing_hooks_run_for_plugins_in_use(plugin_factory: PluginFactory) -> None:
    plugin_factory(DECIDER, name="acme")
    for settings, runs in (
        ({}, False),
        ({"scheduler": {"queue": "mine"}}, True),
        ({"executor": {"name": "uniproc"}, "plugins": {"enabled": ["acme"]}}, True),
    ):
        composition = compose(config(**settings))
        called = composition.host.record("acme").plugin.called
        called.clear()
        composition.host.hook.validate_request(request=1)
        assert called == ([1] if runs else []), settings


def test_enabled_plugins_are_asked_in_the_order_in_which_they_are_listed(plugin_factory: PluginFactory) -> None:
    for name in ("acme", "beta", "corp"):
        source = "from pegboard.plugins import *\nfrom pegboard.plugins import hookimpl\n@hookimpl\ndef schedulers():\n"
        source += f"    return [SchedulerProvider(name={name!r}, target='a:b')]\n"
        plugin_factory(source + f"@hookimpl\ndef select_scheduler(): return {name!r}", name=name)
    for order in (["acme", "beta", "corp"], ["corp", "acme"], ["beta", "corp"]):
        assert compose(config(plugins={"enabled": order})).parts["scheduler"].name == order[0]
