"""The hooks ``configure`` and ``validate``: recorded under the plugin's name, never in silence."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from pegboard.config import ConfigError, PluginDraft
from pegboard.engine import bootstrap
from pegboard.engine.bootstrap import Checked, check, prepare
from pegboard.plugins import Problem, hookimpl
from pegboard.plugins.provider import ExecutorProvider

SLEEPER = """
from pydantic import BaseModel
from pegboard.plugins import ConfigSection, hookimpl

class Options(BaseModel):
    depth: int = 1

@hookimpl
def config_sections():
    return [ConfigSection("cfgt_sleeper", Options)]
"""
FIELD = "scheduler.max_num_seqs"


class Configures:
    def __init__(self, act: Callable[[PluginDraft], Any]) -> None:
        self.act = act
        self.answers: list[Any] = []

    @hookimpl
    def configure(self, draft: PluginDraft) -> None:
        self.answers.append(self.act(draft))


class Validates:
    def __init__(self, *problems: Any) -> None:
        self.problems = problems

    @hookimpl
    def validate(self, config: Any) -> Iterable[Any]:
        for problem in self.problems:
            if isinstance(problem, Exception):
                raise problem
            yield problem


def sets(value: Any, path: str = FIELD, force: bool = False) -> Configures:
    return Configures(lambda draft: draft.set(path, value, force=force))


def run(plugins: dict[str, Any], **arguments: Any) -> Checked:
    return check(**{"env": {}, "model": "m", "plugins": plugins, **arguments})


def test_a_write_is_in_force_and_carries_the_plugins_name() -> None:
    plugin = sets(7)
    checked = run({"tuner": plugin})
    assert checked.config is not None
    assert checked.config.scheduler.max_num_seqs == 7
    assert str(checked.draft.provenance(FIELD)) == "plugin tuner"
    assert plugin.answers == [True]


@pytest.mark.parametrize(
    "arguments",
    [{"max_num_seqs": 4}, {"cli": {"--max-num-seqs": "4"}}, {"env": {"PEGBOARD_SCHEDULER__MAX_NUM_SEQS": "4"}}],
)
def test_what_a_user_set_stays(arguments: dict[str, Any]) -> None:
    plugin = sets(7)
    checked = run({"tuner": plugin}, **arguments)
    assert checked.config is not None
    assert checked.config.scheduler.max_num_seqs == 4
    assert plugin.answers == [False]
    assert [(str(a.origin), a.value) for a in checked.draft.provenance(FIELD).overridden] == [
        ("plugin tuner", 7),
        ("default", 64),
    ]


def test_force_overrides_the_user_and_is_noted() -> None:
    plugin = sets(7, force=True)
    checked = run({"tuner": plugin}, max_num_seqs=4)
    assert checked.config is not None
    assert checked.config.scheduler.max_num_seqs == 7
    found = checked.draft.provenance(FIELD)
    assert str(found) == "plugin tuner (forced)"
    assert [str(a.origin) for a in found.overridden] == ["keyword argument max_num_seqs", "default"]
    assert plugin.answers == [True]


@pytest.mark.parametrize("force", [False, True])
def test_two_plugins_that_disagree_are_both_named(force: bool) -> None:
    checked = run({"b": sets(8, force=force), "a": sets(7, force=force)})
    (problem,) = checked.problems
    assert problem.where == FIELD
    assert "'a' wants 7 and 'b' wants 8" in problem.message
    assert len(problem.sources) == 2


def test_no_conflict_where_they_agree_or_where_the_user_decided() -> None:
    assert run({"a": sets(7), "b": sets(7)}).problems == ()
    decided = run({"a": sets(7), "b": sets(8)}, max_num_seqs=5)
    assert decided.config is not None
    assert decided.config.scheduler.max_num_seqs == 5
    forced = run({"a": sets(7), "b": sets(8, force=True)})
    assert forced.config is not None
    assert forced.config.scheduler.max_num_seqs == 8


def test_a_section_can_be_written_whole() -> None:
    checked = run({"a": sets({"queue": "fcfs", "max_num_seqs": 3}, "scheduler")}, strict=None, cli={"--scheduler.strict": "true"})
    assert [p.where for p in checked.problems] == ["strict"]
    assert checked.draft.get(FIELD) == 3


def test_bad_writes_are_told_under_the_plugins_name() -> None:
    unknown, bad = sets(1, "scheduler.max_num_sqs"), sets(0)
    checked = run({"a": unknown, "b": bad}, dtype="foo")
    where = {p.where: p for p in checked.problems}
    assert set(where) == {"scheduler.max_num_sqs", FIELD, "dtype"}
    assert "says plugin 'a'" in where["scheduler.max_num_sqs"].message
    assert where[FIELD].sources == ("plugin b",)


@pytest.mark.parametrize(
    "path", ["plugins.allow", "plugins.block", "plugins.enabled", "plugins.required", "plugins.strict", "plugins"]
)
def test_what_decided_the_loading_cannot_be_changed_any_more(path: str) -> None:
    (problem,) = run({"a": sets([], path)}).problems
    assert problem.where == path
    assert "loaded already" in problem.message


def test_an_exception_is_told_with_plugin_and_cause() -> None:
    def fail(draft: PluginDraft) -> None:
        raise KeyError("boom-17")

    other = sets(3)
    checked = run({"a": Configures(fail), "b": other})
    (problem,) = checked.problems
    assert "plugin 'a'" in problem.where
    assert "KeyError: 'boom-17'" in problem.message
    assert other.answers == [True]


def test_reading_gives_typed_values_and_origins() -> None:
    def read(draft: PluginDraft) -> tuple[Any, ...]:
        return draft.get("kv_cache.swap_space"), draft.is_set("kv_cache.swap_space"), str(draft.provenance("kv_cache.swap_space"))

    plugin = Configures(read)
    run({"a": plugin}, env={"PEGBOARD_KV_CACHE__SWAP_SPACE": "1KiB"})
    assert plugin.answers == [(1024, True, "environment variable PEGBOARD_KV_CACHE__SWAP_SPACE")]


def test_reading_a_value_that_is_wrong_tells_it_once() -> None:
    checked = run({"a": Configures(lambda draft: draft.get("dtype"))}, dtype="foo")
    assert [p.where for p in checked.problems] == ["dtype"]


def test_a_plugin_whose_part_another_plugin_chooses_has_its_say() -> None:
    class Part(Configures):
        @hookimpl
        def executors(self) -> list[ExecutorProvider]:
            return [ExecutorProvider(name="mine", target="nowhere:Executor")]

    checked = run({"a": sets("mine", "executor.name"), "z": Part(lambda draft: draft.set(FIELD, 9))})
    assert checked.config is not None
    assert (checked.config.executor.name, checked.config.scheduler.max_num_seqs) == ("mine", 9)


def test_problems_of_validate_carry_plugin_and_source() -> None:
    plugins = {
        "a": Validates(Problem(FIELD, "is too small", "take 8"), Problem("elsewhere", "is odd")),
        "b": Validates(Problem("dtype", "is not for me")),
        "c": Validates(ValueError("boom-17")),
        "d": Validates("just text"),
    }
    checked = run(plugins, max_num_seqs=4)
    texts = [f"{p.where}: {p.message}" for p in checked.problems]
    assert checked.config is None
    assert texts[:3] == [
        f"{FIELD}: is too small, says plugin 'a' (given directly)",
        "elsewhere: is odd, says plugin 'a' (given directly)",
        "dtype: is not for me, says plugin 'b' (given directly)",
    ]
    assert checked.problems[0].sources == ("keyword argument max_num_seqs",)
    assert "boom-17" in texts[3]
    assert "Problem" in texts[4]


def test_validate_is_asked_about_a_right_configuration_only() -> None:
    checked = run({"a": Validates(Problem("x", "y"))}, dtype="foo")
    assert [p.where for p in checked.problems] == ["dtype"]


def test_prepare_raises_all_problems_and_else_composes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(env={}, plugins={"a": sets(0)}, model="m", dtype="foo")
    assert {p.where for p in caught.value.problems} == {FIELD, "dtype"}

    monkeypatch.setattr("pegboard.plugins.compose", lambda config, host: ("composed", config, host))
    prepared = prepare(env={}, plugins={"a": sets(5)}, model="m")
    assert isinstance(prepared, bootstrap.Prepared)
    assert prepared.composition == ("composed", prepared.config, prepared.host)
    assert prepared.config.scheduler.max_num_seqs == 5
    assert str(prepared.provenance(FIELD)) == "plugin a"
    with pytest.raises(AttributeError):
        prepared.config = prepared.config  # type: ignore[misc]


def test_prepare_warns_of_forced_values_and_of_sections_without_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "cfgt_sleeper.py").write_text(SLEEPER)
    info = tmp_path / "cfgt_sleeper-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cfgt_sleeper\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pegboard]\ncfgt_sleeper = cfgt_sleeper\n")
    monkeypatch.setattr("pegboard.plugins.compose", lambda config, host: None)
    monkeypatch.setattr(logging.getLogger("pegboard"), "propagate", True)
    prepare(env={}, model="m", max_num_seqs=4, plugins={"a": sets(7, force=True), "cfgt_sleeper": {"depth": 2}})
    told = [r.getMessage() for r in caplog.records]
    assert f"plugin a forces {FIELD} = 7 over 4, set by keyword argument max_num_seqs" in told
    assert any("plugins.cfgt_sleeper is set, but plugin 'cfgt_sleeper'" in text for text in told)
