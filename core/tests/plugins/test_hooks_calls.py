"""One test per hook, second half: configuration, models, start and stop, requests, command line, hooks of a plugin's own.

The name ``test_hook_<name>`` is demanded by tests/docs/test_hooks_documented.py.
"""

from __future__ import annotations

import types
from typing import Any

import pytest

from pegboard.config import EngineConfig, PluginsConfig
from pegboard.plugins import (
    CliCommand,
    ConfigSection,
    PluginHost,
    Problem,
    RequestFields,
    WorkerContext,
    compose,
    hookspec,
)
from pegboard.testing.plugins import compose_with, make_plugin
from pegboard.testing.pytest_plugin import PluginFactory
from pegboard.wire import World

pytestmark = pytest.mark.usefixtures("standard")


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(model="tiny", **settings)


# -- configuration -----------------------------------------------------------------------------------------------------


def test_hook_config_sections() -> None:
    from pydantic import BaseModel

    class Options(BaseModel):
        limit: int = 3

    hooks = {"config_sections": lambda: [ConfigSection("acme", Options)]}
    assert compose_with(hooks).options("acme") == Options(limit=3)
    assert compose_with(hooks, plugins={"acme": {"limit": 5}}).options("acme") == Options(limit=5)
    assert compose_with({}).options("acme") is None


def test_hook_configure() -> None:
    from pegboard.engine.bootstrap import check

    def configure(draft):
        draft.set("scheduler.max_num_seqs", 7)

    checked = check(env={}, plugins={"acme": make_plugin(configure=configure)}, model="tiny")
    assert checked.config is not None
    assert checked.config.scheduler.max_num_seqs == 7
    assert "acme" in str(checked.draft.provenance("scheduler.max_num_seqs").origin)


def test_hook_validate() -> None:
    from pegboard.engine.bootstrap import check

    def validate(config):
        yield Problem("dtype", f"{config.dtype} is not for ACME", "choose another")

    checked = check(env={}, plugins={"acme": make_plugin(validate=validate)}, model="tiny")
    (problem,) = checked.problems
    assert problem.where == "dtype"
    assert "auto is not for ACME" in problem.message


def test_hook_compile_cache_key() -> None:
    host = compose_with({"compile_cache_key": lambda config: f"acme for {config.dtype}"}, dtype="float32").host
    assert host.hook.compile_cache_key(config=config(dtype="float32")) == ["acme for float32"]
    assert compose_with({"compile_cache_key": lambda config: None}).host.hook.compile_cache_key(config=config()) == []


# -- models ------------------------------------------------------------------------------------------------------------


RESOLVER = """
from pegboard.contracts.model_source import ModelSource
from pegboard.plugins import hookimpl
@hookimpl
def resolve_model(ref, config):
    if ref in ("tiny", "acme-tiny"):
        return ModelSource(ref, "/acme", "dummy", "hf", {"architectures": ["TinyForCausalLM"]}, resolved_by="acme")
"""


def test_hook_resolve_model(plugin_factory: PluginFactory) -> None:
    from pegboard.contracts.model_source import ModelNotFound

    with pytest.raises(ModelNotFound, match="nothing knows 'acme-tiny'"):
        compose(EngineConfig(model="acme-tiny"))
    plugin_factory(RESOLVER, name="acme")
    named = compose(EngineConfig(model="acme-tiny"))
    assert named.source.path == "/acme"
    assert named.host.record("acme").active
    assert "acme" in {p.name for p in named.manifest.plugins}
    assert compose(EngineConfig(model="tiny")).source.path == "/tiny", "installed alone, it takes no reference away"
    enabled = PluginsConfig(enabled=["acme"])
    assert compose(EngineConfig(model="tiny", plugins=enabled)).source.path == "/acme"


# -- start and stop, requests ------------------------------------------------------------------------------------------


def engine_hook_is_called(hook: str) -> None:
    seen: list[Any] = []
    composition = compose_with({hook: lambda info: seen.append(info)})
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
    composition = compose_with({hook: lambda context: seen.append(context.world.rank)})
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

    hook = compose_with({"validate_request": validate_request}).host.hook
    hook.validate_request(request="good")
    with pytest.raises(ValueError, match="refused"):
        hook.validate_request(request="bad")


def test_hook_request_fields() -> None:
    fields = RequestFields("acme", "acme:Fields", "deadlines")
    hook = compose_with({"request_fields": lambda: [fields]}).host.hook
    assert hook.request_fields() == [[fields]]


def test_hook_expand_request() -> None:
    def expand_request(request):
        return [f"{request}/{i}" for i in range(2)] if request == "two" else None

    hook = compose_with({"expand_request": expand_request}).host.hook
    assert hook.expand_request(request="two") == ["two/0", "two/1"]
    assert hook.expand_request(request="one") is None


# -- command line ------------------------------------------------------------------------------------------------------

COMMAND = """
from pegboard.plugins import CliCommand, hookimpl
def add_arguments(parser): parser.add_argument("--name", default="world")
def run(args): print("hello,", args.name)
@hookimpl
def cli_commands(): return [CliCommand({name!r}, run, "greet somebody", add_arguments)]
"""


def test_hook_cli_commands(plugin_factory: PluginFactory, capsys: pytest.CaptureFixture[str]) -> None:
    from pegboard.entrypoints.cli.main import main

    plugin_factory(COMMAND.format(name="hello"), name="acme")
    assert main(["hello", "--name", "you"]) == 0
    assert capsys.readouterr().out == "hello, you\n"
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "greet somebody" in capsys.readouterr().out


def test_cli_commands_cannot_take_a_name_that_is_taken(plugin_factory: PluginFactory, caplog: pytest.LogCaptureFixture) -> None:
    from pegboard.entrypoints.cli.plugin_options import plugin_commands

    plugin_factory(COMMAND.format(name="plugins"), name="acme")
    for name in ("beta", "corp"):
        plugin_factory(COMMAND.format(name="hello"), name=name)
    assert list(plugin_commands(PluginHost.load(), taken={"plugins"})) == []
    text = " ".join(r.getMessage() for r in caplog.records)
    assert "command 'plugins' of plugin 'acme'" in text
    assert "plugin 'beta' of beta 1.0 and plugin 'corp' of corp 1.0 both offer it" in text
    assert CliCommand("x", print).summary == ""


def test_hook_add_cli_options(plugin_factory: PluginFactory) -> None:
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

    opens = make_plugin(add_hookspecs=add_hookspecs)
    answers = make_plugin(acme_greeting=lambda name: f"hello, {name}")
    host = PluginHost.load(extra={"zeta": opens, "acme": answers}, discovery=False)
    assert host.hook.acme_greeting(name="you") == ["hello, you"]
    alone = PluginHost.inspect(extra={"acme": answers}, discovery=False)
    assert "there is no hook 'acme_greeting'" in alone.record("acme").reason
