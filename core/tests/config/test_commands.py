"""Command line: flags, ``--set``, and ``pegboard config explain | schema | check``."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from pegboard.config import EngineConfig, Section, add_config_arguments, cli_layer, load_config, load_draft
from pegboard.config.arguments import suggest_flag
from pegboard.config.fields import FieldTree
from pegboard.config.names import flag_name
from pegboard.config.schema import json_schema, table
from pegboard.entrypoints.cli import config_cmd


def parse(*argv: str, own: str = "") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    if own:
        parser.add_argument(own)
    add_config_arguments(parser)
    return parser.parse_args(argv)


def config_of(*argv: str) -> EngineConfig:
    args = parse(*argv)
    return load_config(env={}, file=args.config, cli=cli_layer(args))


def test_flags_for_every_field() -> None:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    flags = parser.format_help()
    for leaf in FieldTree().leaves():
        assert flag_name(leaf.path) in flags


def test_flags_set_fields_and_remember_how_they_were_typed() -> None:
    argv = [
        "--model",
        "m",
        "--dtype",
        "float32",
        "--max-model-len",
        "64",
        "--executor.name",
        "mp",
        "--scheduler.max-num-seqs",
        "8",
    ]
    config = config_of(*argv, "--kv-cache.swap-space=1GiB", "--plugins.block", "a,b", "--executor.num-threads", "null")
    assert config == EngineConfig(
        model="m",
        dtype="float32",
        max_model_len=64,
        executor={"name": "mp"},
        scheduler={"max_num_seqs": 8},
        kv_cache={"swap_space": 1024**3},
        plugins={"block": ["a", "b"]},
    )
    draft = load_draft(env={}, cli=cli_layer(parse(*argv)))
    assert str(draft.provenance("scheduler.max_num_seqs")) == "option --scheduler.max-num-seqs"


def test_short_flags_and_set() -> None:
    config = config_of("--model", "m", "--max-num-seqs", "8", "--set", "block_size=4", "--set", "scheduler.queue=a=b")
    assert (config.scheduler.max_num_seqs, config.kv_cache.block_size, config.scheduler.queue) == (8, 4, "a=b")
    with pytest.raises(SystemExit):
        parse("--strict")


def test_a_section_as_a_flag_means_its_principal_field() -> None:
    config = config_of("--model", "m", "--executor", "mp", "--attention", "torch", "--kv-cache=prefix")
    assert (config.executor.name, config.attention.backend, config.kv_cache.allocator) == ("mp", "torch", "prefix")


def test_of_two_flags_for_a_field_the_later_counts() -> None:
    assert config_of("--model", "a", "--max-num-seqs", "1", "--scheduler.max-num-seqs", "2").scheduler.max_num_seqs == 2
    assert config_of("--model", "a", "--scheduler.max-num-seqs", "2", "--max-num-seqs", "1").scheduler.max_num_seqs == 1
    assert config_of("--model", "a", "--model", "b", "--set", "model=c", "--model", "d").model == "d"


def test_switches() -> None:
    assert config_of("--model", "m", "--scheduler.strict").scheduler.strict is True
    assert config_of("--model", "m", "--scheduler.strict", "--no-scheduler.strict").scheduler.strict is False


def test_only_what_was_typed_is_in_the_layer() -> None:
    assert cli_layer(parse()) == {}
    assert cli_layer(argparse.Namespace()) == {}


def test_flags_that_a_command_has_itself_stay_its_own() -> None:
    args = parse("--seed", "5", "--set", "seed=6", own="--seed")
    assert args.seed == "5"
    assert cli_layer(args) == {"--set seed": "6"}


@pytest.mark.parametrize("text", ["scheduler.max_num_seqs", "=4", ""])
def test_set_without_a_value_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--set", text)
    assert caught.value.code == 2
    assert "PATH=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--max-num-sqs=4", "--max-num-seqs"),
        ("--scheduler.max-num-sqs", "--scheduler.max-num-seqs"),
        ("--max_num_seqs", "--max-num-seqs"),
        ("--dtpe", "--dtype"),
        ("--gpu-memory-utilization", "--kv-cache.memory-fraction"),
        ("--own-opiton", "--own-option"),
    ],
)
def test_near_flags(typed: str, meant: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--own-option")
    add_config_arguments(parser)
    assert suggest_flag(typed, parser._option_string_actions) == f"did you mean {meant}?"
    assert suggest_flag("--nothing-like-it", parser._option_string_actions) == ""


def test_an_unknown_flag_of_a_command_is_refused_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    from pegboard.entrypoints.cli.main import main

    with pytest.raises(SystemExit) as caught:
        main(["generate", "m", "--prompt", "x", "--max-num-sqs", "4"])
    assert caught.value.code == 2
    assert "did you mean --max-num-seqs?" in capsys.readouterr().err


def command(*argv: str) -> int:
    parser = argparse.ArgumentParser(prog="pegboard")
    config_cmd.add_parser(parser.add_subparsers(dest="command"))
    return config_cmd.run(parser.parse_args(["config", *argv]))


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PEGBOARD_CONFIG", "PEGBOARD_MODEL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text('model = "m"\n[scheduler]\nmax_num_seqs = 8\n')
    return path


def test_explain(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PEGBOARD_SCHEDULER__MAX_NUM_SEQS", "9")
    assert command("explain", "--config", str(file), "--set", "seed=3", "--block-size", "32") == 0
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in capsys.readouterr().out.splitlines()}
    assert lines["model"] == ['"m"', f"file {file}, key model"]
    assert lines["scheduler.max_num_seqs"] == ["9", "environment variable PEGBOARD_SCHEDULER__MAX_NUM_SEQS"]
    assert lines["seed"] == ["3", "option --set seed"]
    assert lines["kv_cache.block_size"] == ["32", "option --block-size"]
    assert lines["dtype"] == ['"auto"', "default"]


def test_explain_some_fields_with_what_they_overrode(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("explain", "--config", str(file), "--set", "max_num_seqs=9", "-v", "max_num_seqs", "executor") == 0
    out = capsys.readouterr().out
    overrides = [line.split(maxsplit=2)[1:] for line in out.splitlines() if line.startswith("  overrides")]
    assert ["8", f"file {file}, key scheduler.max_num_seqs"] in overrides
    assert "executor.name" in out
    assert "model" not in out.split()


def test_explain_as_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        command("explain", "--config", str(file), "--set", "max_num_seqs=9", "--json", "scheduler.max_num_seqs", "tokenizer") == 0
    )
    data = json.loads(capsys.readouterr().out)
    assert data["problems"] == []
    seqs, tokenizer = data["fields"]
    assert (seqs["path"], seqs["value"]) == ("scheduler.max_num_seqs", 9)
    assert seqs["origin"] == {
        "layer": "command_line",
        "source": "--set max_num_seqs",
        "key": "",
        "text": "option --set max_num_seqs",
    }
    assert [(o["value"], o["origin"]["layer"]) for o in seqs["overridden"]] == [(8, "file"), (64, "default")]
    assert seqs["overridden"][0]["origin"]["key"] == "scheduler.max_num_seqs"
    assert tokenizer["origin"]["layer"] == "default"


def test_explain_shows_what_it_can_of_a_wrong_configuration(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("explain", "--config", str(file), "--set", "dtype=foo", "--set", "sedd=1") == 2
    told = capsys.readouterr()
    assert '"m"' in told.out
    assert "(not allowed)" in told.out
    assert "2 problems" in told.err
    assert command("explain", "--json", "--set", "dtype=foo") == 2
    assert [p["path"] for p in json.loads(capsys.readouterr().out)["problems"]] == ["dtype"]


def test_explain_without_a_model_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("explain", "model") == 0
    assert capsys.readouterr().out.split() == ["model", "(not", "set)", "required"]


def test_explain_of_an_unknown_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("explain", "max_num_sqs") == 2
    assert "did you mean scheduler.max_num_seqs?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command("explain", "--set", "x")


def test_explain_of_an_unknown_field_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("explain", "scheduler.quue", "--json") == 2
    told = json.loads(capsys.readouterr().out)
    assert told["fields"] == []
    assert told["problems"][0]["remedy"] == "did you mean scheduler.queue?"


def test_check(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PEGBOARD_DTYPE", "what the environment says does not count")
    assert command("check", str(file)) == 0
    assert "fine" in capsys.readouterr().out
    file.write_text('dtype = "foo"\nsedd = 1\n[plugins.absent]\nx = 1\n')
    assert command("check", str(file)) == 2
    err = capsys.readouterr().err
    assert "3 problems" in err
    assert "'absent'" in err
    assert command("check", str(file), "--json") == 2
    assert {p["path"] for p in json.loads(capsys.readouterr().out)["problems"]} == {"dtype", "sedd", "plugins.absent"}
    assert command("check", str(file.parent / "no.toml")) == 2


def test_schema_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("schema", "--json") == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["required"] == ["model"]
    assert command("schema") == 0
    assert "scheduler.max_num_seqs: an integer from 1 to 2147483647; default 64" in capsys.readouterr().out


class Inner(Section):
    width: int = 1


class Outer(Section):
    depth: int = Field(default=2, ge=0, description="how deep")
    inner: Inner = Inner()


def test_schema_describes_every_field_and_plugin_sections() -> None:
    tree = FieldTree()
    tree.add_section("mine", Outer)
    schema = json_schema(tree, lambda kind: [f"{kind}-x"])

    def find(path: str) -> dict[str, Any]:
        node: dict[str, Any] = schema
        for key in path.split("."):
            options = [node, *node.get("anyOf", [])]
            node = next(
                schema["$defs"][o["$ref"].split("/")[-1]] if "$ref" in o else o
                for o in options
                if "$ref" in o or "properties" in o
            )
            node = node["properties"][key]
        return node

    for leaf in FieldTree().leaves():
        assert find(leaf.path)["description"] == leaf.description
    assert find("scheduler.queue")["examples"] == ["request_queue-x"]
    assert find("executor.name")["examples"] == ["auto", "executor-x"]
    assert find("observability.stat_loggers")["items"]["examples"] == ["stat_logger-x"]
    assert find("plugins.mine.depth")["description"] == "how deep"
    assert find("plugins.mine.inner.width")["default"] == 1
    assert {"type": "string", "description": "stands for executor.name"} in schema["properties"]["executor"]["anyOf"]
    assert "plugins.mine.depth: an integer, at least 0; default 2" in table(tree)


PROBE = """
import argparse, sys
from pegboard.entrypoints.cli import config_cmd
light = not {"pydantic", "torch"} & set(sys.modules)
parser = argparse.ArgumentParser()
config_cmd.add_parser(parser.add_subparsers())
status = config_cmd.run(parser.parse_args(sys.argv[1:]))
heavy = sorted({"torch", "transformers", "numpy"} & set(sys.modules))
print("\\nPROBE", light, status, heavy)
"""


@pytest.mark.parametrize("argv", [["explain"], ["schema"], ["schema", "--json"]])
def test_commands_import_nothing_heavy(argv: list[str], file: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE, "config", *argv], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "PROBE True 0 []", done.stderr


def test_importing_the_configuration_imports_no_torch() -> None:
    code = "import sys, pegboard.config, pegboard.engine.bootstrap; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


@pytest.mark.parametrize("first", ["pegboard.config", "pegboard.plugins", "pegboard.config.draft", "pegboard.engine.bootstrap"])
def test_packages_can_be_imported_in_any_order(first: str) -> None:
    code = f"import {first}; from pegboard.config import load_draft; from pegboard.plugins import compose"
    subprocess.run([sys.executable, "-c", code], check=True)
