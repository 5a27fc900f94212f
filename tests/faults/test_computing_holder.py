"""The process that holds an engine of a real model is ended in the middle of an answer: a script, and the command line."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow
Start = Callable[..., "subprocess.Popen[str]"]
NothingLeft = Callable[..., None]

SOON = 10.0
SCRIPT = """
import sys
from pegboard import LLM, SamplingParams

executor = {"name": "mp", "tensor_parallel_size": 2, "num_threads": 1}
llm = LLM(sys.argv[1], dtype="float32", executor=executor, kv_cache={"num_blocks": 600})
print("ready", flush=True)
llm.generate(["first", "second"], SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True))
"""
SET = ["executor.name=mp", "executor.tensor_parallel_size=2", "executor.num_threads=1", "kv_cache.num_blocks=600"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start(*command: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen([sys.executable, *command], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str], what: str, nothing_left: NothingLeft) -> tuple[int, str]:
    """Send the signal to the top process alone, once. (exit status, stderr)"""
    others = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert len(others) == 3, "a supervisor and two ranks"
    process.send_signal(signal.Signals[what])
    _, errors = process.communicate(timeout=SOON)
    nothing_left(others, owner=process.pid)
    return process.returncode, errors


@pytest.mark.parametrize("what", ["SIGKILL", "SIGINT"])
def test_a_script_while_it_generates(what: str, tiny: Path, start: Start, nothing_left: NothingLeft) -> None:
    process = start("-c", SCRIPT, str(tiny))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    status, errors = end(process, what, nothing_left)
    assert status == -signal.Signals[what]
    assert errors.count("Traceback") == (what == "SIGINT")
    assert ("KeyboardInterrupt" in errors) == (what == "SIGINT")


@pytest.mark.parametrize(("what", "expected"), [("SIGINT", 130), ("SIGTERM", -signal.SIGTERM)])
def test_the_command_line_in_the_middle_of_a_stream(
    what: str, expected: int, tiny: Path, start: Start, nothing_left: NothingLeft
) -> None:
    options: list[Any] = [part for one in SET for part in ("--set", one)]
    length = ["--max-tokens", "4000", "--min-tokens", "4000"]
    process = start("-m", "pegboard.entrypoints.cli.main", "generate", str(tiny), "--raw", "-p", "go", *length, *options)
    assert process.stdout is not None
    assert process.stdout.read(5)
    status, errors = end(process, what, nothing_left)
    assert (status, errors.count("Traceback")) == (expected, 0)
    assert ("pegboard generate: interrupted" in errors) == (what == "SIGINT")
