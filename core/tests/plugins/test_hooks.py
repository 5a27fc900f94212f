"""One test per hook: it is called, with what it promises, and only for plugins that have a say.

The name ``test_hook_<name>`` is demanded by tests/docs/test_hooks_documented.py.
"""

from __future__ import annotations

import types
from typing import Any

import pytest

from pegboard.config import EngineConfig, PluginsConfig
from pegboard.contracts.attention import AttentionQuery
from pegboard.contracts.model_source import ModelSource
from pegboard.plugins import (
    KINDS,
    CliCommand,
    CompositionError,
    ConfigSection,
    PluginError,
    PluginHost,
    Problem,
    WorkerContext,
    compose,
    hookimpl,
    hookspec,
    select_attention,
)
from pegboard.plugins.class_path import provider_class
from pegboard.wire import World

pytestmark = pytest.mark.usefixtures("standard")


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(model="tiny", **settings)


def plugin(**hooks: Any) -> type:
    """A plugin class with these hook implementations."""
    return type("Plugin", (), {name: staticmethod(hookimpl(function)) for name, function in hooks.items()})


def offering(kind: str, *names: str, **fields: Any) -> types.FunctionType:
    provider = provider_class(kind)
    return lambda: [provider(name=n, target="nowhere:Part", **fields) for n in names]


def composed(hooks: dict[str, Any], **settings: Any) -> Any:
    """A composition with one plugin given directly, which makes it active."""
    host = PluginHost.load(extra={"acme": plugin(**hooks)})
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


def rides_along(plugin_factory, kind: str, target: str) -> None:
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


def test_hook_worker_extensions(plugin_factory) -> None:
    rides_along(plugin_factory, "worker_extension", "Extension")


def test_hook_event_sinks(plugin_factory) -> None:
    rides_along(plugin_factory, "event_sink", "Sink")
    assert list(compose(config(observability={"event_sinks": ["mine"]})).create_all("event_sink")) == ["mine"]
    with pytest.raises(PluginError, match=r"observability\.event_sinks: no event_sink is called 'nix'"):
        compose(config(observability={"event_sinks": ["nix"]}))


def test_hook_stat_loggers(plugin_factory) -> None:
    rides_along(plugin_factory, "stat_logger", "Logger")
    assert list(compose(config(observability={"stat_loggers": ["mine"]})).create_all("stat_logger")) == ["mine"]


def test_two_observers_of_one_name_are_both_made(plugin_factory) -> None:
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


def test_deciding_hooks_of_a_merely_installed_plugin_change_nothing(plugin_factory) -> None:
    plugin_factory(DECIDER, name="acme")
    assert compose(config()).parts["scheduler"].name == "default"
    # Using one of its parts is not asking it for decisions either.
    assert compose(config(scheduler={"queue": "mine"})).parts["scheduler"].name == "default"
    with pytest.raises(PluginError, match="asked"):
        compose(config(plugins={"enabled": ["acme"]}))


def test_observing_hooks_run_for_plugins_in_use(plugin_factory) -> None:
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


def test_enabled_plugins_are_asked_in_the_order_in_which_they_are_listed(plugin_factory) -> None:
    for name in ("acme", "beta", "corp"):
        source = "from pegboard.plugins import *\nfrom pegboard.plugins import hookimpl\n@hookimpl\ndef schedulers():\n"
        source += f"    return [SchedulerProvider(name={name!r}, target='a:b')]\n"
        plugin_factory(source + f"@hookimpl\ndef select_scheduler(): return {name!r}", name=name)
    for order in (["acme", "beta", "corp"], ["corp", "acme"], ["beta", "corp"]):
        assert compose(config(plugins={"enabled": order})).parts["scheduler"].name == order[0]


# -- configuration -----------------------------------------------------------------------------------------------------


def test_hook_config_sections() -> None:
    from pydantic import BaseModel

    class Options(BaseModel):
        limit: int = 3

    hooks = {"config_sections": lambda: [ConfigSection("acme", Options)]}
    assert composed(hooks).options("acme") == Options(limit=3)
    assert composed(hooks, plugins={"acme": {"limit": 5}}).options("acme") == Options(limit=5)
    assert composed({}).options("acme") is None


def test_hook_configure() -> None:
    from pegboard.engine.bootstrap import check

    def configure(draft):
        draft.set("scheduler.max_num_seqs", 7)

    checked = check(env={}, plugins={"acme": plugin(configure=configure)}, model="tiny")
    assert checked.config is not None
    assert checked.config.scheduler.max_num_seqs == 7
    assert "acme" in str(checked.draft.provenance("scheduler.max_num_seqs").origin)


def test_hook_validate() -> None:
    from pegboard.engine.bootstrap import check

    def validate(config):
        yield Problem("dtype", f"{config.dtype} is not for ACME", "choose another")

    checked = check(env={}, plugins={"acme": plugin(validate=validate)}, model="tiny")
    (problem,) = checked.problems
    assert problem.where == "dtype"
    assert "auto is not for ACME" in problem.message


# -- models ------------------------------------------------------------------------------------------------------------


RESOLVER = """
from pegboard.contracts.model_source import ModelSource
from pegboard.plugins import hookimpl
@hookimpl
def resolve_model(ref, config):
    if ref in ("tiny", "acme-tiny"):
        return ModelSource(ref, "/acme", "dummy", "hf", {"architectures": ["TinyForCausalLM"]}, resolved_by="acme")
"""


def test_hook_resolve_model(plugin_factory) -> None:
    from pegboard.contracts.model_source import ModelNotFound

    with pytest.raises(ModelNotFound, match="nothing knows 'acme-tiny'"):
        compose(EngineConfig(model="acme-tiny"))
    plugin_factory(RESOLVER, name="acme")
    assert compose(EngineConfig(model="acme-tiny")).source.path == "/acme"
    assert compose(EngineConfig(model="tiny")).source.path == "/tiny", "installed alone, it takes no reference away"
    enabled = PluginsConfig(enabled=["acme"])
    assert compose(EngineConfig(model="tiny", plugins=enabled)).source.path == "/acme"


# -- start and stop, requests ------------------------------------------------------------------------------------------


def engine_hook_is_called(hook: str) -> None:
    seen: list[Any] = []
    composition = composed({hook: lambda info: seen.append(info)})
    getattr(composition.host.hook, hook)(info="the info")
    assert seen == ["the info"]


def test_hook_engine_starting() -> None:
    engine_hook_is_called("engine_starting")


def test_hook_engine_ready() -> None:
    engine_hook_is_called("engine_ready")


def test_hook_engine_stopping() -> None:
    engine_hook_is_called("engine_stopping")


def worker_hook_is_called(hook: str) -> None:
    seen: list[Any] = []
    composition = composed({hook: lambda context: seen.append(context.world.rank)})
    getattr(composition.host.hook, hook)(context=WorkerContext(composition.config, composition, World(rank=0)))
    assert seen == [0]


def test_hook_worker_starting() -> None:
    worker_hook_is_called("worker_starting")


def test_hook_worker_stopping() -> None:
    worker_hook_is_called("worker_stopping")


def test_hook_validate_request() -> None:
    def validate_request(request):
        if request == "bad":
            raise ValueError("refused")

    hook = composed({"validate_request": validate_request}).host.hook
    hook.validate_request(request="good")
    with pytest.raises(ValueError, match="refused"):
        hook.validate_request(request="bad")


# -- command line ------------------------------------------------------------------------------------------------------

COMMAND = """
from pegboard.plugins import CliCommand, hookimpl
def add_arguments(parser): parser.add_argument("--name", default="world")
def run(args): print("hello,", args.name)
@hookimpl
def cli_commands(): return [CliCommand({name!r}, run, "greet somebody", add_arguments)]
"""


def test_hook_cli_commands(plugin_factory, capsys) -> None:
    from pegboard.entrypoints.cli.main import main

    plugin_factory(COMMAND.format(name="hello"), name="acme")
    assert main(["hello", "--name", "you"]) == 0
    assert capsys.readouterr().out == "hello, you\n"
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "greet somebody" in capsys.readouterr().out


def test_cli_commands_cannot_take_a_name_that_is_taken(plugin_factory, caplog) -> None:
    from pegboard.entrypoints.cli.plugin_options import plugin_commands

    plugin_factory(COMMAND.format(name="plugins"), name="acme")
    for name in ("beta", "corp"):
        plugin_factory(COMMAND.format(name="hello"), name=name)
    assert list(plugin_commands(PluginHost.load(), taken={"plugins"})) == []
    text = " ".join(r.getMessage() for r in caplog.records)
    assert "command 'plugins' of plugin 'acme'" in text
    assert "plugin 'beta' of beta 1.0 and plugin 'corp' of corp 1.0 both offer it" in text
    assert CliCommand("x", print).summary == ""


def test_hook_add_cli_options(plugin_factory) -> None:
    import argparse

    from pegboard.config.arguments import add_config_arguments, cli_layer
    from pegboard.config.load import load_draft
    from pegboard.entrypoints.cli.plugin_options import add_plugin_options, merge_plugin_options

    source = """
    from pydantic import BaseModel
    from pegboard.plugins import ConfigSection, hookimpl
    class Options(BaseModel):
        limit: int = 3
    @hookimpl
    def config_sections(): return [ConfigSection("acme", Options)]
    @hookimpl
    def add_cli_options(command, group):
        if command == "generate":
            group.add_argument("--limit", type=int, dest="plugins.acme.limit", default=99)
            group.add_argument("--model", dest="conflicts")
    """
    plugin_factory(source, name="acme")
    host = PluginHost.load()

    def given(*argv: str, command: str = "generate") -> dict[str, Any]:
        parser = argparse.ArgumentParser()
        add_config_arguments(parser)
        add_plugin_options(parser, command, host)
        args = parser.parse_args(argv)
        merge_plugin_options(args)
        return cli_layer(args)

    assert given() == {}, "a default of the option does not override file and environment"
    assert given("--limit", "5") == {"plugins.acme.limit": 5}
    with pytest.raises(SystemExit):
        given("--limit", "5", command="chat")
    draft = load_draft(env={}, cli=given("--limit", "5"), model="tiny")
    draft.declare_section("acme", host.record("acme").plugin.Options)
    assert draft.get("plugins.acme.limit") == 5


# -- hooks of a plugin's own -------------------------------------------------------------------------------------------


def test_hook_add_hookspecs() -> None:
    @hookspec
    def acme_greeting(name):
        """What to say."""

    def add_hookspecs(pluginmanager):
        pluginmanager.add_hookspecs(types.SimpleNamespace(acme_greeting=acme_greeting))

    opens = plugin(add_hookspecs=add_hookspecs)
    answers = plugin(acme_greeting=lambda name: f"hello, {name}")
    host = PluginHost.load(extra={"zeta": opens, "acme": answers}, discovery=False)
    assert host.hook.acme_greeting(name="you") == ["hello, you"]
    alone = PluginHost.inspect(extra={"acme": answers}, discovery=False)
    assert "there is no hook 'acme_greeting'" in alone.record("acme").reason
