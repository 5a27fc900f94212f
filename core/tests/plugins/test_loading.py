"""Loading: one plugin's failure is its own."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard.config import PluginsConfig
from pegboard.plugins import PluginError, PluginHost, PluginRecord, PluginStatus, hookimpl
from pegboard.plugins import importing as importing_module
from pegboard.testing.pytest_plugin import PluginFactory

RecordOf = Callable[[PluginHost, str], PluginRecord]

GOOD = """
from pegboard.plugins import hookimpl, RequestQueueProvider
@hookimpl
def request_queues():
    return [RequestQueueProvider(name="good", target="good:Queue")]
"""
IN_OFFER = """
from pegboard.plugins import hookimpl
@hookimpl
def request_queues():
    raise RuntimeError("boom-17")
"""
BROKEN = {
    "import_error": ("import no_such_module_here", "no_such_module_here"),
    "syntax_error": ("def broken(:", "SyntaxError"),
    "raises": ("raise RuntimeError('boom-17')", "boom-17"),
    "sys_exit": ("import sys; sys.exit(1)", "sys.exit(1)"),
    "base_exception": ("class Odd(BaseException): pass\nraise Odd('boom-17')", "boom-17"),
    "in_offer": (IN_OFFER, "boom-17"),
    "no_iterable": ("from pegboard.plugins import hookimpl\n@hookimpl\ndef executors():\n    pass", "returned None"),
    "wrong_kind": (
        "from pegboard.plugins import *\nfrom pegboard.plugins import hookimpl\n@hookimpl\ndef executors():\n"
        "    return [RequestQueueProvider(name='x', target='a:b')]",
        "must give providers of kind 'executor'",
    ),
    "not_a_list": (
        "from pegboard.plugins import *\nfrom pegboard.plugins import hookimpl\n@hookimpl\ndef executors():\n"
        "    return ExecutorProvider(name='x', target='a:b')",
        "returned one provider",
    ),
    "twice": (
        "from pegboard.plugins import *\nfrom pegboard.plugins import hookimpl\n@hookimpl\ndef executors():\n"
        "    return [ExecutorProvider(name='x', target='a:b')] * 2",
        "two providers named 'x'",
    ),
    "bad_capabilities": (
        "from pegboard.plugins import *\nfrom pegboard.plugins import hookimpl\n@hookimpl\ndef executors():\n"
        "    return [ExecutorProvider(name='x', target='a:b', capabilities='tp')]",
        "capabilities must be a set",
    ),
    "str_raises": (
        "class Odd(Exception):\n    def __str__(self): raise ValueError('no text')\nraise Odd",
        "Odd",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_b083_a_broken_plugin_warns_once_and_harms_no_other(
    plugin_factory: PluginFactory, caplog: pytest.LogCaptureFixture, record_of: RecordOf, case: str
) -> None:
    source, cause = BROKEN[case]
    plugin_factory(source, name="acme-bad", version="3.2")
    plugin_factory(GOOD, name="good")
    caplog.set_level(logging.DEBUG, "pegboard")
    host = PluginHost.load()
    assert "good" in host.providers("request_queue")
    record = record_of(host, "acme-bad")
    assert record.status is PluginStatus.BROKEN
    (warning,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING and "acme-bad" in r.message]
    for fact in ("'acme-bad'", "acme-bad 3.2", cause):
        assert fact in warning
    traces = [r for r in caplog.records if r.levelno == logging.DEBUG and r.exc_info and "acme-bad" in r.message]
    assert len(traces) == 1


def test_b083_missing_attribute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_of: RecordOf) -> None:
    from pegboard.testing.distributions import write_distribution

    write_distribution(tmp_path, "acme", {"acme_a": "x = 1"}, {"acme": "acme_a:plugin"})
    monkeypatch.syspath_prepend(str(tmp_path))
    record = record_of(PluginHost.inspect(), "acme")
    assert record.status is PluginStatus.BROKEN
    assert "has no attribute 'plugin'" in record.reason


@pytest.mark.parametrize("case", ["import_error", "sys_exit", "in_offer"])
def test_b083_strict_is_an_error_with_the_same_facts(plugin_factory: PluginFactory, case: str) -> None:
    source, cause = BROKEN[case]
    plugin_factory(source, name="acme-bad", version="3.2")
    with pytest.raises(PluginError) as caught:
        PluginHost.load(PluginsConfig(strict=True))
    for fact in ("plugins.strict", "'acme-bad'", "acme-bad 3.2", cause):
        assert fact in str(caught.value)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("settings", [{"enabled": ["acme-bad"]}, {"required": ["acme-bad>=1"]}, {"acme-bad": {"x": 1}}])
def test_b083_a_broken_plugin_that_the_configuration_names_is_an_error(
    plugin_factory: PluginFactory, settings: dict[str, Any]
) -> None:
    plugin_factory("raise RuntimeError('boom-17')", name="acme-bad")
    with pytest.raises(PluginError, match="boom-17"):
        PluginHost.load(PluginsConfig(**settings))


def test_b083_what_a_plugin_prints_goes_to_stderr(plugin_factory: PluginFactory, capsys: pytest.CaptureFixture[str]) -> None:
    plugin_factory("print('hello from the plugin')\n" + GOOD, name="acme")
    PluginHost.load()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "hello from the plugin" in captured.err


def test_b083_a_slow_import_is_named_while_it_lasts(
    plugin_factory: PluginFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importing_module, "SLOW_SECONDS", 0.05)
    plugin_factory("import time; time.sleep(0.5)", name="acme-slow", version="3.2")
    PluginHost.load()
    error = capsys.readouterr().err
    assert "acme-slow 3.2" in error
    assert "PEGBOARD_PLUGINS_BLOCK=acme-slow" in error


def test_b083_interrupts_are_not_swallowed(plugin_factory: PluginFactory) -> None:
    plugin_factory("raise KeyboardInterrupt", name="acme")
    with pytest.raises(KeyboardInterrupt):
        PluginHost.load()


@pytest.mark.parametrize("command", ["--help", "--version", "plugins list --json"])
def test_b083_commands_work_beside_broken_plugins(plugin_factory: PluginFactory, command: str) -> None:
    for case in ("import_error", "sys_exit", "in_offer"):
        last = plugin_factory(BROKEN[case][0], name=f"bad-{case.replace('_', '-')}", folder=None)
    environment = last.environment | {"PYTHONPATH": ":".join(p for p in sys.path if "sites" in p)}
    run = subprocess.run(
        [sys.executable, "-m", "pegboard.entrypoints.cli.main", *command.split()],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout
    if command == "--help":
        assert run.stderr.count("is broken") == 3


def test_entry_point_to_a_class_or_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_of: RecordOf) -> None:
    from pegboard.testing.distributions import write_distribution

    source = """
    from pegboard.plugins import hookimpl, RequestQueueProvider
    class Plugin:
        def __init__(self, name="from_class"):
            self.name = name
        @hookimpl
        def request_queues(self):
            return [RequestQueueProvider(name=self.name, target="a:b")]
    made = Plugin("from_object")
    """
    write_distribution(tmp_path, "acme", {"acme_c": source}, {"one": "acme_c:Plugin", "two": "acme_c:made"})
    monkeypatch.syspath_prepend(str(tmp_path))
    host = PluginHost.load()
    assert {"from_class", "from_object"} <= set(host.providers("request_queue"))


def test_plugin_objects_that_cannot_be_hashed_are_refused_clearly() -> None:
    import types

    host = PluginHost.inspect(extra={"x": types.SimpleNamespace()}, discovery=False)
    assert "not hashable" in host.record("x").reason


class TestB092Versions:
    """Host and plugin of different versions."""

    def status(self, plugin: object) -> tuple[PluginStatus, str]:
        record = PluginHost.inspect(extra={"acme": plugin}, discovery=False).record("acme")
        return record.status, record.reason

    def test_unknown_hook_with_a_suggestion(self) -> None:
        class Plugin:
            @hookimpl
            def request_queue(self):
                return []

        status, reason = self.status(Plugin)
        assert status is PluginStatus.INCOMPATIBLE
        assert "'request_queue'" in reason
        assert "did you mean 'request_queues'" in reason

    def test_unknown_hook_that_is_optional(self) -> None:
        class Plugin:
            @hookimpl(optionalhook=True)
            def some_future_hook(self):
                return []

        assert self.status(Plugin)[0] is PluginStatus.LOADED

    def test_arguments_that_the_hook_does_not_give(self) -> None:
        class Plugin:
            @hookimpl
            def validate(self, config, sources):
                return []

        status, reason = self.status(Plugin)
        assert status is PluginStatus.INCOMPATIBLE
        assert "'sources'" in reason
        assert "the hook gives config" in reason

    def test_all_problems_of_a_plugin_are_told_at_once(self) -> None:
        class Plugin:
            @hookimpl
            def validat(self, config): ...

            @hookimpl
            def configure(self, drafft): ...

        reason = self.status(Plugin)[1]
        assert "'validat'" in reason
        assert "'drafft'" in reason

    def test_fewer_arguments_than_the_hook_gives_are_fine(self) -> None:
        class Plugin:
            @hookimpl
            def select_executor(self, config):
                return None

            @hookimpl
            def validate(self):
                return []

        assert self.status(Plugin)[0] is PluginStatus.LOADED

    def test_offering_hooks_cannot_be_wrapped(self) -> None:
        class Plugin:
            @hookimpl(wrapper=True)
            def executors(self):
                return (yield)

        assert "must not be a wrapper" in self.status(Plugin)[1]

    def test_a_plugin_that_excludes_this_host_is_not_imported(self, plugin_factory, record_of) -> None:
        plugin_factory("raise RuntimeError('imported')", name="acme", requires=["pegboard<0", "numpy"])
        record = record_of(PluginHost.inspect(), "acme")
        assert record.status is PluginStatus.INCOMPATIBLE
        assert "requires pegboard<0" in record.reason
        assert "imported" not in record.reason

    def test_requirements_of_other_extras_or_systems_do_not_count(self, plugin_factory, record_of) -> None:
        plugin_factory(GOOD, name="acme", requires=["pegboard<0; extra == 'old'", "pegboard<0; sys_platform == 'plan9'"])
        assert record_of(PluginHost.inspect(), "acme").status is PluginStatus.LOADED

    def test_a_satisfied_requirement(self, plugin_factory, record_of) -> None:
        plugin_factory(GOOD, name="acme", requires=["pegboard>=0.0"])
        assert record_of(PluginHost.inspect(), "acme").status is PluginStatus.LOADED


def test_a_forgotten_marker_is_noted(plugin_factory: PluginFactory, record_of: RecordOf) -> None:
    plugin_factory("def request_queues():\n    return []", name="acme")
    (note,) = record_of(PluginHost.inspect(), "acme").notes
    assert "request_queues" in note
    assert "@hookimpl" in note


def test_shuffled_registration_gives_the_same_answers(plugin_factory: PluginFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, calling order and reports do not depend on the order in which plugins are found."""
    import random

    from pegboard.plugins import discovery, host

    source = "from pegboard.plugins import *\nfrom pegboard.plugins import hookimpl\nNAME = __name__\n"
    source += "@hookimpl\ndef request_queues():\n    return [RequestQueueProvider(name='shared', target='a:b')]\n"
    source += "@hookimpl(tryfirst=False)\ndef select_scheduler(config, candidates):\n    return NAME\n"
    names = ["acme", "beta", "corp"]
    for name in names:
        plugin_factory(source, name=name)
    settings = PluginsConfig(enabled=["corp", "acme"])
    seen = set()
    original = discovery.discover
    for seed in range(6):

        def shuffled(seed: int = seed) -> discovery.Discovery:
            found = original()
            random.Random(seed).shuffle(found.plugins)
            return found

        monkeypatch.setattr(host, "discover", shuffled)
        loaded = PluginHost.load(settings)
        seen.add(
            (
                tuple(loaded.providers("request_queue")),
                loaded.hook.select_scheduler(config=None, candidates={}),
                tuple(loaded.hook.implemented_by("select_scheduler")),
                tuple(r.name for r in loaded.records),
            )
        )
    assert len(seen) == 1
    (answer,) = seen
    assert answer[1] == "corp"
