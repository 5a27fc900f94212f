"""Hooks, their pages, their tests and their examples agree."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pluggy
import pytest

from pegboard import hookspecs
from pegboard.config import EngineConfig
from pegboard.config.draft import ConfigDraft
from pegboard.contracts.attention import AttentionQuery
from pegboard.engine.info import EngineInfo
from pegboard.plugins import KINDS, CliCommand, ConfigSection, PluginHost, Problem, RequestFields, WorkerContext
from pegboard.plugins.class_path import contract_problems
from pegboard.plugins.hookcheck import specified
from pegboard.plugins.provider import accepted_arguments
from pegboard.wire import EngineCoreRequest, SamplingParams, World

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "hooks"
HOOK_TESTS = ROOT / "core" / "tests" / "plugins"


def all_specs() -> dict[str, pluggy.HookCaller]:
    manager = pluggy.PluginManager("pegboard")
    manager.add_hookspecs(hookspecs)
    return specified(manager)


SPECS = all_specs()


def test_pages_match_the_source() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "hook_pages.py"), "--check"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", SPECS)
def test_every_hook_has_a_page_with_its_exact_arguments(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text()
    match = re.search(rf"^{name}\((.*?)\) -> (.+)$", text, re.MULTILINE)
    assert match, "the page does not show the signature"
    function = ast.parse(f"def {name}({match[1]}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    spec = SPECS[name].spec
    assert spec is not None
    assert tuple(a.arg for a in function.args.args) == tuple(spec.argnames)
    assert all(a.annotation is not None for a in function.args.args), "an argument has no type"
    assert ("first answer" in text) == bool(spec.opts.get("firstresult"))
    assert name in (PAGES / "README.md").read_text()


def test_no_page_without_a_hook() -> None:
    assert {p.stem for p in PAGES.glob("*.md")} == {*SPECS, "README"}


def test_every_hook_has_a_test() -> None:
    trees = [ast.parse(path.read_text()) for path in HOOK_TESTS.glob("test_*.py")]
    tests = {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}
    missing = [name for name in SPECS if f"test_hook_{name}" not in tests]
    assert not missing, f"write test_hook_<name> in {HOOK_TESTS}"
    stale = [t for t in tests if t.startswith("test_hook_") and t.removeprefix("test_hook_") not in SPECS]
    assert not stale


def test_every_kind_of_part_has_its_hook() -> None:
    assert {kind.hook for kind in KINDS.values()} <= set(SPECS)


def example(name: str) -> types.ModuleType:
    """The example in the docstring of a hook, as a module."""
    blocks = re.findall(r"```python\n(.*?)```", getattr(hookspecs, name).__doc__ or "", re.DOTALL)
    assert len(blocks) == 1, f"{name} needs one example"
    lines = blocks[0].splitlines()
    source = "\n".join(line[4:] if line.startswith("    ") else line for line in lines)
    module = types.ModuleType(f"example_{name}")
    exec(compile(source, f"example of {name}", "exec"), module.__dict__)
    return module


def arguments(name: str) -> dict[str, Any]:
    """Something real for every argument of a hook."""
    config = EngineConfig(model="acme-tiny")
    info = EngineInfo(model="m", vocab_size=10, max_model_len=64, kv_tokens=64, num_blocks=4, block_size=16)
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=[1], sampling=SamplingParams(), stop_token_ids=[], max_tokens=1, arrival_time=0.0
    )
    composition: Any = None
    everything = {
        "config": config,
        "candidates": {},
        "query": AttentionQuery("cpu", "float32", "float32", 1, 1, 256, 16),
        "draft": ConfigDraft().writer("example"),
        "ref": "acme-tiny",
        "info": info,
        "context": WorkerContext(config, composition, World(rank=0)),
        "request": request,
        "command": "generate",
        "group": argparse.ArgumentParser().add_argument_group("plugin"),
        "pluginmanager": pluggy.PluginManager("pegboard"),
    }
    spec = SPECS[name].spec
    assert spec is not None
    return {argument: everything[argument] for argument in spec.argnames}


@pytest.mark.parametrize("name", SPECS)
def test_every_example_is_a_plugin_that_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_RANK", "0")  # so that the example for worker_starting leaves nothing behind
    host = PluginHost.load(extra={"example": example(name)}, discovery=False)
    record = host.record("example")
    assert record is not None
    assert name in record.hooks
    assert not record.notes
    answer = getattr(host.hook, name)(**arguments(name))
    kind = next((k for k in KINDS.values() if k.hook == name), None)
    if kind is not None:
        check_parts(host, kind.name)
    elif name in ("config_sections", "request_fields", "cli_commands", "validate"):
        items = [item for several in answer for item in several]
        expected = {
            "config_sections": ConfigSection,
            "request_fields": RequestFields,
            "cli_commands": CliCommand,
            "validate": Problem,
        }[name]
        assert all(isinstance(item, expected) for item in items)
        assert items or name == "validate"


def check_parts(host: PluginHost, kind: str) -> None:
    """What is written out in the example keeps its contract, and can be made."""
    providers = host.providers(kind)
    assert providers
    for provider in providers.values():
        assert provider.summary
        if not isinstance(provider.target, str):
            assert contract_problems(kind, provider.target) == []
            provider.load()()


def test_the_guide_names_every_status_and_setting() -> None:
    from pegboard.config.models import PLUGINS_KEYS
    from pegboard.plugins import PluginStatus
    from pegboard.plugins.selection import ALLOW_VARIABLE, BLOCK_VARIABLE

    text = (ROOT / "docs" / "plugins.md").read_text()
    for word in (*PluginStatus, *(f"plugins.{k}" for k in PLUGINS_KEYS), ALLOW_VARIABLE, BLOCK_VARIABLE):
        assert f"`{word}`" in text, word


def guide_examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "plugins.md").read_text(), re.DOTALL)


def test_plugins_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pegboard.plugins.options import section_of

    plugins = [block for block in guide_examples() if "@hookimpl" in block and "plugin_factory" not in block]
    assert len(plugins) == 2
    for number, block in enumerate(plugins):
        module = types.ModuleType(f"guide_{number}")
        exec(compile(block, "docs/plugins.md", "exec"), module.__dict__)
        host = PluginHost.load(extra={"acme": module}, discovery=False)
        for provider in host.providers("request_queue").values():
            offered = {"options": section_of(host, EngineConfig(model="m").plugins, "acme")}
            provider.load()(**accepted_arguments(provider.load(), offered))


@pytest.mark.slow
def test_tests_of_the_guide_run(tmp_path: Path) -> None:
    """As an author would run them, beside the first plugin of the guide."""
    first, *others = guide_examples()
    (tmp_path / "acme_queue.py").write_text(first)
    tests = [block for block in others if "Conformance" in block or "plugin_factory" in block]
    assert len(tests) == 2
    for number, block in enumerate(tests):
        (tmp_path / f"test_guide_{number}.py").write_text(block)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
