"""Plugin sections: validated by the plugin's own model, with the same provenance as core's fields."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field, SecretStr, field_validator, model_validator

from pegboard.config import EngineConfig, Section
from pegboard.config.errors import Problem
from pegboard.engine.bootstrap import Checked, check
from pegboard.plugins import ConfigSection, PluginHost, hookimpl
from pegboard.plugins.provider import RequestQueueProvider


class Window(Section):
    size: int = Field(default=4, ge=1, description="tokens looked back")
    name: str = "w"


class Options(Section):
    """Options of the fake plugin."""

    principal = "policy"

    threshold: float = Field(default=0.5, ge=0, le=1, description="share at which it acts")
    policy: str = "soft"
    names: list[str] = []
    table: dict[str, int] = {}
    window: Window = Window(size=8)

    @field_validator("policy")
    @classmethod
    def _known(cls, value: str) -> str:
        if value == "unwise":
            raise ValueError("that policy is not wise")
        return value

    @model_validator(mode="after")
    def _fits(self) -> "Options":
        if self.threshold > 0.9 and self.policy == "soft":
            raise ValueError("soft needs a threshold of at most 0.9")
        return self


class Offers:
    """A plugin that offers sections and nothing else."""

    def __init__(self, *sections: ConfigSection) -> None:
        self.sections = sections

    @hookimpl
    def config_sections(self) -> list[ConfigSection]:
        return list(self.sections)


BIDKV = Offers(ConfigSection("bid-kv", Options))


def run(plugin: object = BIDKV, name: str = "bid-kv", **arguments: Any) -> Checked:
    plugins = {name: plugin, **arguments.pop("plugins", {})}
    return check(**{"env": {}, "model": "m", "plugins": plugins, **arguments})


def the_problem(checked: Checked) -> Problem:
    assert len(checked.problems) == 1, checked.problems
    assert checked.config is None
    return checked.problems[0]


def given(content: dict[str, Any]) -> dict[str, Any]:
    return {"file": None, "cli": {f"plugins.bid-kv.{k}": v for k, v in content.items()}}


def test_a_section_from_every_layer(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[plugins.bid-kv]\nthreshold = 0.25\npolicy = "hard"\nnames = ["f"]\ntable = {a = 1, b = 2}\n')
    env = {"PEGBOARD_PLUGINS__BID_KV__POLICY": "firm", "PEGBOARD_PLUGINS__BID_KV__WINDOW__NAME": "e"}
    checked = run(file=file, env=env, cli={"--set plugins.bid_kv.names": "x, y"})
    assert checked.problems == ()
    assert checked.config is not None
    assert checked.config.plugins.sections["bid-kv"] == {
        "threshold": 0.25,
        "policy": "firm",
        "names": ["x", "y"],
        "table": {"a": 1, "b": 2},
        "window": {"size": 8, "name": "e"},
    }
    assert checked.config.plugins.section("bid-kv", Options).window == Window(size=8, name="e")
    found = checked.draft.provenance("plugins.bid-kv.policy")
    assert str(found) == "environment variable PEGBOARD_PLUGINS__BID_KV__POLICY"
    assert [str(a.origin) for a in found.overridden] == [f"file {file}, key plugins.bid-kv.policy", "default"]
    assert str(checked.draft.provenance("plugins.bid-kv.threshold")) == f"file {file}, key plugins.bid-kv.threshold"


def test_the_whole_is_plain_data_for_other_processes() -> None:
    config = run(**given({"threshold": 0.1})).config
    assert config is not None
    assert EngineConfig.model_validate(json.loads(config.model_dump_json())) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_section_that_nobody_sets_is_not_in_the_configuration() -> None:
    checked = run()
    assert checked.config is not None
    assert checked.config.plugins.sections == {}
    assert checked.draft.get("plugins.bid-kv.threshold") == 0.5
    assert checked.draft.get("plugins.bid-kv")["window"] == {"size": 8, "name": "w"}


def test_an_empty_section_has_the_defaults() -> None:
    config = run(plugins={"bid-kv": BIDKV}).config
    assert config is not None
    section = check(env={"PEGBOARD_PLUGINS__BID_KV": "{}"}, model="m", plugins={"bid-kv": BIDKV}).config
    assert section is not None
    assert section.plugins.section("bid-kv", Options) == Options()


def test_a_bare_text_is_the_principal_field() -> None:
    config = run(env={"PEGBOARD_PLUGINS__BID_KV": "hard"}).config
    assert config is not None
    assert config.plugins.sections["bid-kv"]["policy"] == "hard"


def test_wrong_values_and_keys_are_told_like_those_of_core() -> None:
    env = {"PEGBOARD_PLUGINS__BID_KV__THRESHOLD": "2", "PEGBOARD_PLUGINS__BID_KV__POLICI": "x", "PEGBOARD_DTYPE": "foo"}
    checked = run(env=env, cli={"--set plugins.bid-kv.window.sice": "1"})
    assert [p.where for p in checked.problems] == [
        "PEGBOARD_PLUGINS__BID_KV__POLICI",
        "plugins.bid-kv.window.sice",
        "dtype",
        "plugins.bid-kv.threshold",
    ]
    policy, window, _, threshold = checked.problems
    assert "PEGBOARD_PLUGINS__BID_KV__POLICY" in policy.remedy
    assert "plugins.bid-kv.window.size" in window.remedy
    assert "at least 0" in threshold.remedy or "from 0" in threshold.remedy
    assert threshold.sources == ("environment variable PEGBOARD_PLUGINS__BID_KV__THRESHOLD",)


def test_validators_of_the_model_speak_with_the_source() -> None:
    field = the_problem(run(**given({"policy": "unwise"})))
    assert field.where == "plugins.bid-kv.policy"
    assert "not wise" in field.message
    assert field.sources == ("command line argument plugins.bid-kv.policy",)
    whole = the_problem(run(**given({"threshold": "0.95"})))
    assert whole.where == "plugins.bid-kv"
    assert "at most 0.9" in whole.message
    assert whole.sources == ("command line argument plugins.bid-kv.threshold",)


class Strict(BaseModel):
    level: int


class Loose(BaseModel, extra="allow"):
    level: int = 1


class Sealed(BaseModel):
    token: SecretStr = SecretStr("x")


def test_a_required_option_is_missed_only_when_the_section_is_set() -> None:
    plugin = Offers(ConfigSection("s", Strict))
    assert run(plugin, "s").problems == ()
    missing = the_problem(run(plugin, "s", env={"PEGBOARD_PLUGINS__S": "{}"}))
    assert missing.where == "plugins.s.level"
    assert "required" in missing.message


def test_a_model_that_takes_any_key_gets_them() -> None:
    checked = run(Offers(ConfigSection("s", Loose)), "s", cli={"plugins.s.free": "text", "plugins.s.deep.er": "1"})
    assert checked.config is not None
    assert checked.config.plugins.sections["s"] == {"level": 1, "free": "text", "deep": {"er": "1"}}


def test_a_model_that_json_cannot_hold_is_refused() -> None:
    problem = the_problem(run(Offers(ConfigSection("s", Sealed)), "s", cli={"plugins.s.token": "hush"}))
    assert "stored and read back" in problem.message
    assert "hush" not in str(problem)


def test_a_model_given_by_its_path() -> None:
    plugin = Offers(ConfigSection("s", "pegboard.config.models:KVCacheSettings"))
    config = run(plugin, "s", cli={"plugins.s.swap_space": "1KiB"}).config
    assert config is not None
    assert config.plugins.sections["s"]["swap_space"] == 1024


@pytest.mark.parametrize("model", ["no_such_module:Model", "pegboard.config.models:parse_bytes", dict, None, 5])
def test_a_model_that_cannot_be_used_is_told(model: object) -> None:
    problem = the_problem(run(Offers(ConfigSection("s", model)), "s", cli={"plugins.s.x": "1"}))
    assert problem.where == "plugins.s"
    assert "model" in problem.message


@pytest.mark.parametrize("name", ["enabled", "strict", "a.b", ""])
def test_names_that_a_section_cannot_have(name: str) -> None:
    problem = the_problem(run(Offers(ConfigSection(name, Options)), "p"))
    assert problem.where == f"plugins.{name}"
    assert "name" in problem.message
    assert "plugin 'p'" in problem.message


def test_two_plugins_cannot_have_one_section() -> None:
    problem = the_problem(run(plugins={"other": Offers(ConfigSection("bid-kv", Strict))}))
    assert problem.where == "plugins.bid-kv"
    assert "plugin 'bid-kv'" in problem.message
    assert "plugin 'other'" in problem.message


def test_a_hook_that_fails_is_told() -> None:
    problem = the_problem(run(Offers(None), "p"))  # type: ignore[arg-type]
    assert "config_sections of plugin 'p'" in problem.message


def test_the_model_of_a_provider_is_a_section_of_its_plugin() -> None:
    class Queue:
        @hookimpl
        def request_queues(self) -> list[RequestQueueProvider]:
            return [RequestQueueProvider(name="lifo", target="nowhere:Queue", config=Options)]

    config = run(Queue(), "stack", cli={"plugins.stack.policy": "hard"}, queue="lifo").config
    assert config is not None
    assert config.plugins.sections["stack"]["policy"] == "hard"


def install(folder: Path, name: str, code: str) -> None:
    """A distribution with one plugin of the same name, as an installer would leave it."""
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[pegboard]\n{name} = {name}\n")


GOOD = """
from pydantic import BaseModel
from pegboard.plugins import ConfigSection, hookimpl

class Options(BaseModel):
    depth: int = 1

@hookimpl
def config_sections():
    return [ConfigSection(__name__, Options)]

@hookimpl
def configure(draft):
    draft.set("scheduler.max_num_seqs", 3)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_section_of_an_absent_plugin(site: Path) -> None:
    """A plugin-specific key while the plugin is absent."""
    install(site, "cfgt_present", GOOD)
    checked = check(env={}, model="m", cli={"plugins.cfgt_presnt.depth": "2", "plugins.cfgt_presnt.width": "2"})
    problem = the_problem(checked)
    assert problem.where == "plugins.cfgt_presnt"
    assert "no installed plugin or distribution is called 'cfgt_presnt'" in problem.message
    assert "sections there are: cfgt_present" in problem.remedy
    assert "did you mean plugins.cfgt_present?" in problem.remedy
    assert problem.sources == (
        "command line argument plugins.cfgt_presnt.depth",
        "command line argument plugins.cfgt_presnt.width",
    )


def test_a_section_of_a_blocked_plugin_says_so(site: Path) -> None:
    install(site, "cfgt_blocked", GOOD)
    plugins = {"block": ["cfgt_blocked"], "cfgt_blocked": {"depth": 2}}
    problem = the_problem(check(env={}, model="m", plugins=plugins))
    assert problem.where == "plugins.cfgt_blocked"
    assert "is blocked" in problem.message


def test_a_section_of_a_broken_plugin_says_why(site: Path) -> None:
    install(site, "cfgt_broken", "raise RuntimeError('boom-17')")
    problem = the_problem(check(env={}, model="m", plugins={"cfgt_broken": {"depth": 2}}))
    assert "is broken" in problem.message
    assert "boom-17" in problem.message
    assert "cfgt-broken 1.5" in problem.message


def test_a_section_of_a_plugin_without_options(site: Path) -> None:
    problem = the_problem(run(Offers(), "plain", plugins={"enabled": []}, cli={"plugins.plain.x": "1"}))
    assert "takes no options" in problem.message


def test_an_idle_plugin_with_bad_sections_harms_nobody(site: Path) -> None:
    install(site, "cfgt_odd", GOOD.replace("ConfigSection(__name__, Options)", "None"))
    install(site, "cfgt_bad", GOOD.replace("Options)", "'no_such_module:Options')"))
    install(site, "cfgt_enabled", GOOD.replace("__name__", "'enabled'"))
    assert check(env={}, model="m", all_sections=True).problems == ()
    problem = the_problem(check(env={}, model="m", plugins={"cfgt_bad": {"depth": 1}}))
    assert "no_such_module" in problem.message


def test_installed_is_not_active(site: Path) -> None:
    """Without being named, a plugin changes nothing; its section alone can be set, and is checked."""
    install(site, "cfgt_idle", GOOD)
    idle = check(env={}, model="m")
    assert idle.config == EngineConfig(model="m")
    assert "cfgt_idle" not in idle.draft.tree.sections
    assert "cfgt_idle" in check(env={}, model="m", all_sections=True).draft.tree.sections
    section = check(env={}, model="m", plugins={"cfgt_idle": {"depth": "x"}})
    assert the_problem(section).where == "plugins.cfgt_idle.depth"
    enabled = check(env={}, model="m", plugins={"enabled": ["cfgt_idle"]})
    assert enabled.config is not None
    assert enabled.config.scheduler.max_num_seqs == 3


def test_names_of_parts_are_checked_with_their_source() -> None:
    checked = run(cli={"--executor.name": "mpp", "--queue": "fcf"}, stat_loggers=["nope"], dtype="foo")
    where = {p.where: p for p in checked.problems}
    assert set(where) == {"executor.name", "scheduler.queue", "observability.stat_loggers", "dtype"}
    assert "'mpp'" in where["executor.name"].message
    assert where["executor.name"].sources == ("option --executor.name",)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no_such_module:Queue", "no_such_module"),
        ("pegboard.config:Nope", "no attribute 'Nope'"),
        ("pegboard.config:EngineConfig", "subclass of"),
        ("LIFO", "did you mean 'lifo'"),
        ("auto", "no request_queue is called 'auto'"),
    ],
)
def test_a_part_that_does_not_work_is_told_before_anything_starts(name: str, told: str) -> None:

    class Queue:
        @hookimpl
        def request_queues(self) -> list[RequestQueueProvider]:
            return [RequestQueueProvider(name="lifo", target="nowhere:Queue")]

    problem = the_problem(run(Queue(), queue=name))
    assert problem.where == "scheduler.queue"
    assert told in problem.message
    assert problem.sources == ("keyword argument queue",)


def test_plugins_that_the_configuration_insists_on_are_problems_with_a_source() -> None:
    checked = run(plugins={"enabled": ["absent-one"], "required": ["absent-dist>=1"]}, dtype="foo")
    assert [p.where for p in checked.problems] == ["plugins.enabled", "plugins.required", "dtype"]
    assert checked.problems[0].sources == ("keyword argument plugins.enabled",)


def test_wrong_plugin_settings_stop_only_what_depends_on_them() -> None:
    checked = check(env={}, model="m", dtype="foo", plugins={"block": 5, "someones": {"x": 1}})
    assert checked.host is None
    assert [p.where for p in checked.problems] == ["dtype", "plugins.block"]


def test_composition_gets_the_section_typed() -> None:
    from pegboard.plugins.options import section_of

    checked = run(**given({"threshold": "0.25"}))
    assert isinstance(checked.host, PluginHost)
    assert checked.config is not None
    assert section_of(checked.host, checked.config.plugins, "bid-kv") == Options(threshold=0.25)
