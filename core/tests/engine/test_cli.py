"""``pegboard generate`` and ``pegboard chat`` over a fake engine."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from pegboard.contracts.tokenizer import NoChatTemplate
from pegboard.entrypoints.cli import chat_cmd, generate_cmd, report, sampling_options, streaming
from pegboard.wire import SamplingParams, StructuredOutputs

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(make_engine: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Run:
    """``cli(what the model says, arguments, stdin)`` gives exit status, stdout and stderr."""

    def run(said: list[str], arguments: list[str], stdin: str = "", **facts: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(streaming, "_ids", (f"cli-{i}" for i in range(100)))
        script = {f"cli-{i}": line for i, line in enumerate(said)}
        monkeypatch.setattr(report, "start_engine", lambda args: make_engine(script, **facts))
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        parser = argparse.ArgumentParser()
        commands = parser.add_subparsers()
        generate_cmd.add_parser(commands)
        chat_cmd.add_parser(commands)
        args = parser.parse_args(arguments)
        status = args.run(args)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_generate_streams_to_stdout_and_times_to_stderr(cli: Run) -> None:
    status, out, err = cli(["Paris."], ["generate", "m", "--prompt", "capital?"])
    assert (status, out) == (0, "Paris.\n")
    assert "7 tokens in" in err
    assert "tok/s" in err


def test_generate_reads_stdin_and_files(cli: Run, tmp_path: Any) -> None:
    assert cli(["ab"], ["generate"], "from a pipe")[1] == "ab\n"
    assert cli(["ab"], ["generate", "-p", "-"], "from a pipe")[1] == "ab\n"
    (tmp_path / "a.txt").write_text("from a file")
    assert cli(["ab"], ["generate", "-f", str(tmp_path / "a.txt")])[1] == "ab\n"
    status, _, err = cli([], ["generate", "-f", str(tmp_path / "none")])
    assert status == 2
    assert "none" in err


def test_generate_several_prompts_as_json(cli: Run) -> None:
    status, out, _ = cli(["ab", "cd"], ["generate", "--json", "-p", "x", "-p", "y", "--raw"])
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(x["prompt"], x["text"], x["finish_reason"], x["prompt_tokens"]) for x in lines] == [
        ("x", "ab", "stop", 1),
        ("y", "cd", "stop", 1),
    ]
    assert status == 0


def test_generate_uses_the_chat_template_unless_raw(cli: Run) -> None:
    chat = json.loads(cli(["a"], ["generate", "--json", "-p", "x"])[1])
    raw = json.loads(cli(["a"], ["generate", "--json", "-p", "x", "--raw"])[1])
    assert chat["prompt_tokens"] > raw["prompt_tokens"] == 1


def test_generate_without_a_chat_template(cli: Run, letters: Any) -> None:
    class Plain(letters):  # type: ignore[misc, valid-type]
        def apply_chat_template(self, *_: Any, **__: Any) -> list[int]:
            raise NoChatTemplate("the model has no chat template; give one")

    status, out, _ = cli(["ab"], ["generate", "-p", "x"], tokenizer=Plain())
    assert (status, out) == (0, "ab\n")
    for option in (["--chat"], ["--system", "be kind"]):
        status, out, err = cli(["ab"], ["generate", "-p", "x", *option], tokenizer=Plain())
        assert (status, out) == (2, "")
        assert "no chat template" in err


@pytest.mark.parametrize(
    ("options", "text"),
    [(["--max-tokens", "2"], "ab"), (["--stop", "cd"], "ab"), (["--no-stream"], "abcdef"), (["--temperature", "0.5"], "abcdef")],
)
def test_generate_options(cli: Run, options: list[str], text: str) -> None:
    assert cli(["abcdef"], ["generate", "-p", "x", *options])[1] == text + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", ""], "zero tokens"),
        (["-p", "x", "--raw", "--temperature", "-1"], "temperature=-1.0 must be"),
        (["-p", "x", "--max-tokens", "1000"], "max_tokens=1000"),
        (["-p", "x", "--raw", "--system", "be brief"], "--system is part of a chat prompt"),
    ],
)
def test_generate_refuses_in_one_line(cli: Run, arguments: list[str], message: str) -> None:
    status, out, err = cli([], ["generate", "--raw", *arguments] if "--raw" not in arguments else ["generate", *arguments])
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("pegboard generate: ")
    assert err.count("\n") == 1


def test_generate_several_answers(cli: Run) -> None:
    status, out, err = cli(["ab"], ["generate", "-p", "x", "--n", "3", "--seed", "1"])
    assert (status, out) == (0, "ab\n\nab\n\nab\n")
    assert err.count("tokens in") == 3
    lines = [json.loads(line) for line in cli(["ab"], ["generate", "-p", "x", "--n", "2", "--json"])[1].splitlines()]
    assert [(line["index"], line["text"]) for line in lines] == [(0, "ab"), (1, "ab")]
    assert "logprobs" not in lines[0]


def test_generate_shows_logprobs_as_json(cli: Run) -> None:
    line = json.loads(cli(["ab"], ["generate", "-p", "x", "--json", "--logprobs", "2"])[1])
    assert line["logprobs"]["tokens"] == ["a", "b", "<eos>"]
    assert line["logprobs"]["text_offset"] == [0, 1, 2]
    status, _, err = cli(["ab"], ["generate", "-p", "x", "--logprobs", "2"])
    assert (status, err) == (2, "pegboard generate: --logprobs are only shown with --json\n")


def test_options_become_sampling_parameters(make_engine: Any, tmp_path: Any) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    (tmp_path / "rules.ebnf").write_text('start: "a"')
    engine = make_engine({}, generation_config={"top_p": 0.5})

    def params(*options: str, **more: Any) -> SamplingParams:
        parser = argparse.ArgumentParser()
        sampling_options.add_sampling_options(parser, 16)
        return sampling_options.sampling_params(parser.parse_args(options), engine, 10, 16, **more)

    plain = SamplingParams(temperature=0.0, top_p=0.5, max_tokens=16)
    assert params() == plain
    assert params("--max-tokens", "7") == params("-n", "7") == SamplingParams(temperature=0.0, top_p=0.5, max_tokens=7)
    assert params(n=2).temperature == 1.0
    given = params(
        "--temperature", "0.5", "--top-p", "0.9", "--top-k", "3", "--min-p", "0.1", "--repetition-penalty", "1.1", "--seed", "5",
        "--presence-penalty", "0.2", "--frequency-penalty", "0.3", "--min-tokens", "2", "--stop", "x", "--stop", "y",
        "--bad-word", "no",
    )  # fmt: skip
    assert given == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, repetition_penalty=1.1, seed=5, presence_penalty=0.2,
        frequency_penalty=0.3, min_tokens=2, stop=("x", "y"), bad_words=("no",), max_tokens=16,
    )  # fmt: skip
    languages = {
        ("--json-schema", str(tmp_path / "schema.json")): StructuredOutputs(json={"type": "object"}),
        ("--grammar", str(tmp_path / "rules.ebnf")): StructuredOutputs(grammar='start: "a"'),
        ("--json-object",): StructuredOutputs(json_object=True),
        ("--regex", "a+"): StructuredOutputs(regex="a+"),
        ("--choice", "yes", "--choice", "no"): StructuredOutputs(choice=["yes", "no"]),
    }
    for options, language in languages.items():
        assert params(*options).structured_outputs == language


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--n", "0"], "n=0 must be between 1"),
        (["--logprobs", "21"], "logprobs=21 must be between 0 and 20"),
        (["--json-schema", "nowhere.json"], "--json-schema nowhere.json: "),
        (["--choice", ""], "choice entries must be non-empty texts"),
        (["--regex", "a"], "structured_outputs.regex needs a grammar backend"),
        (["--min-p", "2"], "min_p=2.0 must be in"),
    ],
)
def test_options_out_of_range_are_one_line(cli: Run, options: list[str], message: str) -> None:
    status, out, err = cli(["ab"], ["generate", "-p", "x", *options])
    assert (status, out) == (2, "")
    assert err.startswith("pegboard generate: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_schema_that_is_no_json_is_told_with_its_file(cli: Run, tmp_path: Any) -> None:
    (tmp_path / "bad.json").write_text("{")
    assert "bad.json: json is no JSON" in cli(["ab"], ["generate", "-p", "x", "--json-schema", str(tmp_path / "bad.json")])[2]


def test_only_one_form_of_the_answer(cli: Run, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cli(["ab"], ["generate", "-p", "x", "--regex", "a", "--json-object"])
    assert "not allowed with" in capsys.readouterr().err


def test_generate_tells_an_answer_that_failed(cli: Run) -> None:
    status, _, err = cli([[1, "not a number"]], ["generate", "-p", "x"])  # type: ignore[list-item]
    assert status == 1
    assert "the answer failed: not a number" in err


def test_other_errors_name_their_type(capsys: Any) -> None:
    def work(args: argparse.Namespace) -> int:
        raise OSError("disk full")

    assert report.reporting(argparse.Namespace(), "generate", work) == 1
    assert capsys.readouterr().err == "pegboard generate: OSError: disk full\n"
    assert report.reporting(argparse.Namespace(verbose=True), "generate", work) == 1
    assert "Traceback" in capsys.readouterr().err


def test_chat_answers_line_by_line_and_remembers(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[int] = []
    real = streaming.stream

    def watched(engine: Any, prompt: Any, *rest: Any) -> Any:
        prompts.append(len(prompt["prompt_token_ids"]))
        return real(engine, prompt, *rest)

    monkeypatch.setattr(streaming, "stream", watched)
    status, out, err = cli(["ab", "cd", "ef", "gh"], ["chat"], "hi\n\nhi\n/reset\nhi\n/system be kind\nhi\n/exit\nhi\n")
    assert (status, out, err) == (0, "ab\ncd\nef\ngh\n", "")
    first, second, reset, system = prompts
    assert first == reset < second
    assert system == first + len("system: be kind\n")


def test_ctrl_c_stops_the_answer_and_nothing_else(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_ids", iter(["first", "second"]))
    engine = make_engine({"first": "abcdefghi", "second": "xyz"})
    step, shown = engine.step, []

    def interrupted_step() -> Any:
        if len(shown) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(engine, "step", interrupted_step)
    params = SamplingParams(max_tokens=20)
    [answer] = streaming.stream(engine, "hi", params, shown.append)
    assert (answer.text, answer.interrupted, answer.finish_reason) == ("abc", True, "abort")
    assert engine.stats().num_running == 0
    monkeypatch.setattr(engine, "step", step)
    assert streaming.stream(engine, "hi", params, shown.append)[0].text == "xyz"


def test_chat_commands_explain_themselves(cli: Run) -> None:
    status, out, err = cli([], ["chat"], "/help\n/what\n")
    assert (status, out) == (1, "")
    assert "/reset" in err
    assert "unknown command /what" in err


def test_a_message_too_long_is_taken_back(cli: Run) -> None:
    status, out, err = cli(["", "ab"], ["chat", "--timing"], f"{'x' * 200}\nhi\n")
    assert (status, out) == (1, "ab\n")
    assert "max_model_len=128" in err
    assert "3 tokens in" in err
