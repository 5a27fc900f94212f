"""``pegboard plugins`` and the frame of the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pegboard.entrypoints.cli.main import main
from pegboard.testing.distributions import WrittenDistribution, write_distribution
from pegboard.testing.pytest_plugin import PluginFactory

Cli = Callable[..., tuple[int, str, str]]
PathOf = Callable[..., dict[str, str]]

pytestmark = pytest.mark.usefixtures("standard")

GOOD = """
from pegboard.contracts.request_queue import KeyedRequestQueue
from pegboard.plugins import RequestQueueProvider, hookimpl
class Queue(KeyedRequestQueue):
    def key(self, request): return 0
@hookimpl
def request_queues(): return [RequestQueueProvider(name="fast", target=Queue, summary="a fast one")]
"""
HALF = GOOD.replace("def key(self, request): return 0", "pass")
OLD = GOOD.replace("target=Queue", "target=Queue, api=0")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]):
    def run(*argv: str):
        status = main(argv)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_list_as_json_tells_everything(plugin_factory: PluginFactory, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    good = plugin_factory(GOOD, name="acme", version="3.2")
    plugin_factory("raise RuntimeError('boom-17')", name="bad")
    plugin_factory(GOOD, name="off")
    plugin_factory(OLD, name="old")
    monkeypatch.setenv("PEGBOARD_PLUGINS_BLOCK", "off")
    status, out, _ = cli("plugins", "list", "--json")
    assert status == 0
    plugins = {p["name"]: p for p in json.loads(out)}
    assert plugins["acme"] == {
        "name": "acme",
        "distribution": "acme",
        "version": "3.2",
        "entry_point": "acme = acme",
        "location": str(good.folder),
        "status": "loaded",
        "reason": "",
        "active": False,
        "hooks": ["request_queues"],
        "providers": [
            {
                "kind": "request_queue",
                "name": "fast",
                "api": 1,
                "host_api": 1,
                "usable": True,
                "reason": "",
                "summary": "a fast one",
            }
        ],
        "notes": [],
    }
    assert plugins["bad"]["status"] == "broken"
    assert "boom-17" in plugins["bad"]["reason"]
    assert plugins["off"]["status"] == "blocked"
    assert plugins["off"]["reason"] == "blocked by PEGBOARD_PLUGINS_BLOCK"
    assert plugins["old"]["status"] == "incompatible"
    assert plugins["old"]["providers"][0]["usable"] is False
    assert plugins["standard"]["active"] is True


def test_list_as_text(plugin_factory: PluginFactory, cli: Cli) -> None:
    plugin_factory(GOOD, name="acme", version="3.2")
    status, out, _ = cli("plugins", "list")
    assert status == 0
    lines = out.splitlines()
    (line,) = [i for i, text in enumerate(lines) if text.startswith("acme")]
    assert lines[line].split()[:4] == ["acme", "acme", "3.2", "loaded"]
    assert lines[line + 1].strip() == "request_queue v1: fast"


@pytest.mark.parametrize(
    ("name", "what"), [("acme", "plugin"), ("fast", "provider"), ("request_queue:fast", "provider"), ("request_queue", "kind")]
)
def test_show(plugin_factory: PluginFactory, cli: Cli, name: str, what: str) -> None:
    plugin_factory(GOOD, name="acme")
    status, out, _ = cli("plugins", "show", name, "--json")
    assert status == 0
    (item,) = json.loads(out)
    assert item["what"] == what
    assert "fast" in out
    status, out, _ = cli("plugins", "show", name)
    assert status == 0
    assert "fast" in out


def test_show_what_is_not_there(cli: Cli) -> None:
    status, _, error = cli("plugins", "show", "fcsf")
    assert status == 2
    assert "did you mean 'fcfs'" in error


def test_check_compares_with_the_contracts(plugin_factory: PluginFactory, cli: Cli) -> None:
    plugin_factory(GOOD, name="acme")
    plugin_factory(HALF, name="half")
    plugin_factory(OLD, name="old")
    assert cli("plugins", "check", "acme")[:2] == (0, "acme: 1 provider checked, all keep their contracts\n")
    status, out, _ = cli("plugins", "check", "half", "--json")
    assert status == 1
    assert "lacks key for the contract RequestQueue" in json.loads(out)["problems"][0]
    status, out, _ = cli("plugins", "check", "old")
    assert status == 1
    assert "version 0" in out
    assert cli("plugins", "check", "nix")[0] == 2
    assert cli("plugins", "check", "acme:fast")[:2] == (0, "acme:fast: 1 provider checked, all keep their contracts\n")


@pytest.mark.parametrize(
    ("name", "package"),
    [("mp", "pegboard-executor-mp"), ("pegboard-executor-mp", "pegboard-executor-mp"), ("ray-mq", "pegboard-executor-ray")],
)
def test_what_another_package_offers_is_told_with_that_package(cli: Cli, name: str, package: str) -> None:
    status, _, error = cli("plugins", "show", name)
    assert status == 2
    assert f"pip install {package}" in error


CHOOSES = """
from pegboard.plugins import Chosen, hookimpl
@hookimpl
def select_preemption_policy(config, candidates):
    return Chosen("recompute", "this host swaps slowly")
"""


def test_show_says_what_the_configuration_means_and_why(
    cli: Cli, plugin_factory: PluginFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def chosen(kind: str, *more: str) -> str:
        status, out, _ = cli("plugins", "show", kind, "--json", *more)
        assert status == 0
        return str(json.loads(out)[0].get("chosen"))

    plugin_factory(CHOOSES, name="acme")
    assert chosen("executor") == "uniproc (one rank)"
    assert chosen("preemption_policy") == "recompute (the default for scheduler.preemption = 'auto')"
    assert chosen("sampler") == ""
    settings = tmp_path / "settings.toml"
    settings.write_text('plugins.enabled = ["acme"]\nexecutor.tensor_parallel_size = 2')
    assert "pip install pegboard-executor-mp" in chosen("executor", "--config", str(settings))
    assert chosen("preemption_policy", "--config", str(settings)).startswith("recompute (this host swaps slowly; chosen by")
    monkeypatch.setenv("PEGBOARD_EXECUTOR__TENSOR_PARALLEL_SIZE", "none")
    assert chosen("executor").startswith("not known: executor.tensor_parallel_size")


@pytest.mark.parametrize("variable", [True, False])
def test_a_config_file_that_cannot_be_read_is_no_empty_one(cli: Cli, monkeypatch: pytest.MonkeyPatch, variable: bool) -> None:
    monkeypatch.setenv("PEGBOARD_CONFIG", "nix.toml" if variable else "")
    status, out, error = cli("plugins", "list", *([] if variable else ["--config", "nix.toml"]))
    assert (status, out) == (2, "")
    assert "nix.toml: the config file does not exist" in error


def test_an_unknown_option_is_told_with_the_usage_of_the_innermost_command(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli("plugins", "list", "--confg", "x")
    error = capsys.readouterr().err
    assert "usage: pegboard plugins list" in error
    assert "did you mean --config?" in error


class TestDoctor:
    def problems(self, cli, *more: str) -> list[str]:
        status, out, _ = cli("plugins", "doctor", "--json", *more)
        found = json.loads(out)["problems"]
        assert status == int(bool(found))
        return found

    def test_nothing_wrong(self, plugin_factory, cli) -> None:
        plugin_factory(GOOD, name="acme")
        status, out, _ = cli("plugins", "doctor")
        assert status == 0
        assert "nothing is wrong" in out

    @pytest.mark.parametrize(
        ("source", "told"),
        [
            ("raise RuntimeError('boom-17')", "boom-17"),
            ("raise SystemExit(3)", "sys.exit(3)"),
            (OLD, "version 0"),
            ("from pegboard.plugins import hookimpl\n@hookimpl\ndef executor(): return []", "did you mean 'executors'"),
        ],
    )
    def test_a_plugin_that_cannot_be_used(self, plugin_factory, cli, source, told) -> None:
        plugin_factory(source, name="bad")
        (problem,) = self.problems(cli)
        assert told in problem

    def test_duplicates(self, plugin_factory, cli) -> None:
        plugin_factory(GOOD, name="acme")
        plugin_factory(GOOD, name="beta")
        (problem,) = self.problems(cli)
        assert "'acme:fast' or 'beta:fast'" in problem

    def test_two_versions(self, tmp_path, monkeypatch, cli) -> None:
        for version in ("1.0", "2.0"):
            write_distribution(tmp_path / version, "acme", {"acme_v": GOOD}, {"acme": "acme_v"}, version=version)
            monkeypatch.syspath_prepend(str(tmp_path / version))
        (problem,) = self.problems(cli)
        assert "several versions" in problem

    def test_unknown_names_in_lists(self, cli, monkeypatch) -> None:
        monkeypatch.setenv("PEGBOARD_PLUGINS_BLOCK", "nix")
        (problem,) = self.problems(cli)
        assert "PEGBOARD_PLUGINS_BLOCK names 'nix'" in problem

    def test_a_config_file(self, tmp_path, cli) -> None:
        file = tmp_path / "engine.toml"
        file.write_text('[plugins]\nrequired = ["acme>=2"]\nenabled = ["beta"]\n')
        problems = self.problems(cli, "--config", str(file))
        assert any("'acme>=2' is not installed" in p for p in problems)
        assert any("plugins.enabled: no installed plugin or distribution is called 'beta'" in p for p in problems)

    def test_targets_only_when_asked(self, plugin_factory, cli) -> None:
        plugin_factory(HALF, name="half")
        assert self.problems(cli) == []
        problems = self.problems(cli, "--targets")
        assert any("lacks key" in p for p in problems)


def test_b083_json_stays_clean_whatever_plugins_print(
    plugin_factory: PluginFactory, standard: WrittenDistribution, path_of: PathOf
) -> None:
    """Also what is written past ``sys.stdout``, by C code or a child process."""
    noisy = plugin_factory(
        "import os, subprocess, sys\nprint('printed')\nos.write(1, b'written')\n"
        "subprocess.run([sys.executable, '-c', 'print(\"from a child\")'])\n" + GOOD,
        name="noisy",
    )
    run = subprocess.run(
        [sys.executable, "-m", "pegboard.entrypoints.cli.main", "plugins", "list", "--json"],
        capture_output=True,
        text=True,
        env=path_of(standard, noisy),
        timeout=60,
    )
    assert {p["name"] for p in json.loads(run.stdout)} >= {"noisy", "standard"}
    for text in ("printed", "written", "from a child"):
        assert text in run.stderr


@pytest.mark.parametrize("argv", [["plugins", "list"], ["--help"], ["--version"], ["plugins", "--help"], ["generate", "--help"]])
def test_light_commands_import_neither_torch_nor_transformers(
    argv: list[str], standard: WrittenDistribution, path_of: PathOf
) -> None:
    code = (
        "import sys\nfrom pegboard.entrypoints.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'safetensors', 'ray', 'triton'} & set(sys.modules)\n"
        "sys.exit(','.join(sorted(heavy)) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, env=path_of(standard), timeout=60)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("argv", [["plugins", "list"], ["--help"]])
def test_light_commands_do_not_import_pydantic(argv: list[str], standard: WrittenDistribution, path_of: PathOf) -> None:
    """It would double their time."""
    code = (
        "import sys\nfrom pegboard.entrypoints.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\nsys.exit('pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, *argv], env=path_of(standard), timeout=60).returncode == 0


class TestFrame:
    def test_version(self, cli, capsys) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["--version"])
        assert caught.value.code in (0, None)
        assert capsys.readouterr().out.startswith("pegboard ")

    def test_an_unknown_command(self, capsys) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["plugin"])
        assert caught.value.code == 2
        assert "did you mean 'plugins'" in capsys.readouterr().err

    def test_no_command_prints_help(self, capsys) -> None:
        with pytest.raises(SystemExit) as caught:
            main([])
        assert caught.value.code == 0
        assert "COMMAND" in capsys.readouterr().out

    def test_a_user_s_error_is_one_line_and_status_2(self, plugin_factory, capsys) -> None:
        source = """
        from pegboard.plugins import CliCommand, PluginError, hookimpl
        def run(args): raise PluginError("the value, the limit, the remedy")
        def crash(args): raise RuntimeError("a bug")
        @hookimpl
        def cli_commands(): return [CliCommand("fail", run), CliCommand("crash", crash)]
        """
        plugin_factory(source, name="acme")
        assert main(["fail"]) == 2
        assert capsys.readouterr().err == "pegboard: error: the value, the limit, the remedy\n"
        with pytest.raises(RuntimeError, match="a bug"):
            main(["crash"])

    def test_an_interrupt_is_status_130(self, plugin_factory) -> None:
        source = """
        from pegboard.plugins import CliCommand, hookimpl
        def run(args): raise KeyboardInterrupt
        @hookimpl
        def cli_commands(): return [CliCommand("stop", run)]
        """
        plugin_factory(source, name="acme")
        assert main(["stop"]) == 130

    def test_a_broken_pipe_is_quiet(self, standard, path_of) -> None:
        command = f"{sys.executable} -m pegboard.entrypoints.cli.main plugins list | true"
        for _ in range(3):
            run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=path_of(standard), timeout=60)
            assert "Traceback" not in run.stderr
            assert "Error" not in run.stderr

    def test_a_strange_log_level_is_told(self, monkeypatch, capsys) -> None:
        monkeypatch.setenv("PEGBOARD_LOG_LEVEL", "loud")
        main(["plugins", "list"])
        assert "PEGBOARD_LOG_LEVEL=LOUD is no level" in capsys.readouterr().err
