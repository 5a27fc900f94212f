"""Engines of two ranks that start at the same instant, each in a process of its own: none gets in another one's way."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard import SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("pegboard_executor_mp") is None, reason="pegboard-executor-mp is not installed"),
]
ENGINES = 6
PROMPT = [5, 6, 7, 8, 9]
TOKENS = 12
SCRIPT = f"""
import json, sys
from pegboard import LLM, SamplingParams

executor = {{"name": "mp", "tensor_parallel_size": 2, "num_threads": 1, "communicator": sys.argv[2]}}
params = SamplingParams(temperature=0, max_tokens={TOKENS}, ignore_eos=True)
print("here", flush=True)
while sys.stdin.readline():
    with LLM(sys.argv[1], dtype="float32", executor=executor, kv_cache={{"num_blocks": 50}}) as llm:
        print(json.dumps(list(llm.generate({PROMPT}, params)[0].outputs[0].token_ids)), flush=True)
"""


@pytest.fixture
def starters(tiny: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that start an engine when they get a line, and answer with what it said. All are told the same port."""
    environment = {**os.environ, "MASTER_PORT": "29500", "MASTER_ADDR": "127.0.0.1"}
    pipe = subprocess.PIPE
    found = []
    for number in range(ENGINES):
        communicator = ("shared_memory", "torch_distributed")[number % 2]
        command = [sys.executable, "-c", SCRIPT, str(tiny), communicator]
        found.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment))
    yield found
    for process in found:
        process.kill()
        process.wait()
        process.stdin.close()  # type: ignore[union-attr]
        process.stdout.close()  # type: ignore[union-attr]


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("rounds", [2, pytest.param(5, marks=pytest.mark.long)])
def test_engines_that_start_at_once(rounds: int, starters: Any, tiny: Path, open_llm: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    wanted = list(open_llm(tiny).generate(PROMPT, params)[0].outputs[0].token_ids)
    assert [line_of(process) for process in starters] == ["here\n"] * ENGINES
    for _ in range(rounds):
        for process in starters:
            process.stdin.write("go\n")
            process.stdin.flush()
        assert [json.loads(line_of(process)) for process in starters] == [wanted] * ENGINES
    for process in starters:
        process.stdin.close()
    assert [process.wait(60) for process in starters] == [0] * ENGINES
