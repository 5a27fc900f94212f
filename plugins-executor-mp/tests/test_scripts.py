"""Scripts without a main guard: nobody imports them, whichever way they run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pegboard.testing.checkpoints import make_checkpoint

SCRIPT = """
import os, sys
from pegboard import LLM, SamplingParams
from pegboard.contracts.worker import Worker
from pegboard.plugins import WorkerProvider, hookimpl
from pegboard.testing.fakes import RunnerWorker
from pegboard.testing.ranked_model import RankedPlugin

print("top level")

def helper():
    return 17

class OwnWorker(RunnerWorker):
    pass

class Plugin(RankedPlugin):
    @hookimpl
    def workers(self):
        return [WorkerProvider(name="own", target=OwnWorker)]

def start(worker="own", **plugins):
    options = {"preload": [], "start_method": os.environ.get("START_METHOD", "fork_server")}
    return LLM("scripted", max_model_len=64, plugins={"ranked": Plugin(), "executor_mp": options, **plugins},
        executor={"name": "mp", "worker": worker, "tensor_parallel_size": 2})
"""
RUNS = """
llm = start()
print(llm.generate("prompt", SamplingParams(max_tokens=5, temperature=0))[0].outputs[0].token_ids)
print(llm.collective_rpc(lambda worker: (type(worker).__name__, helper())))
"""
THREE_LINES = """
from pegboard import LLM
llm = LLM({model!r}, executor={{"tensor_parallel_size": 2}})
print(repr(llm.generate("go on")[0].text))
"""
LIMIT = 30.0


def run(command: list[str], text: str = "", cwd: Path | None = None, **environment: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr); fails if there are ever more descendants than two ranks and three."""
    pipe = subprocess.PIPE
    variables = {**os.environ, **environment}
    process = subprocess.Popen(
        [sys.executable, *command], stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=cwd, env=variables
    )
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.close()
    most, end = 0, time.monotonic() + LIMIT
    watched = psutil.Process(process.pid)
    try:
        while process.poll() is None:
            assert time.monotonic() < end, "it hangs"
            try:
                most = max(most, len(watched.children(recursive=True)))
            except psutil.Error:
                break
            time.sleep(0.02)
        out, err = process.stdout.read(), process.stderr.read()  # type: ignore[union-attr]
        process.wait(LIMIT)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            stream.close()  # type: ignore[union-attr]
    assert most <= 5
    return process.returncode, out, err


WAYS = [(how, method) for how in ("file", "stdin", "exec") for method in ("fork_server", "spawn")]


@pytest.mark.parametrize(
    ("how", "start_method"), [pytest.param(*way, marks=pytest.mark.slow if number else ()) for number, way in enumerate(WAYS)]
)
def test_a_script_without_main_guard_works(how: str, start_method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + RUNS)
    execute = f"exec(compile(open({str(script)!r}).read(), '<cell>', 'exec'), {{'__name__': '__main__'}})"
    commands = {"file": [str(script)], "stdin": ["-"], "exec": ["-c", execute]}
    status, out, err = run(commands[how], script.read_text() if how == "stdin" else "", tmp_path, START_METHOD=start_method)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "top level"
    assert len(eval(lines[1])) == 5
    assert lines[2:] == ["[('OwnWorker', 17), ('OwnWorker', 17)]"]


@pytest.mark.slow
def test_three_lines_and_a_real_model(tmp_path: Path) -> None:
    status, out, err = run(["-"], THREE_LINES.format(model=str(make_checkpoint(tmp_path / "model"))))
    assert (status, "Traceback" in err) == (0, False)
    assert len(eval(out)) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "error"),
    [
        ("start(me=sys.modules['__main__'])", "plugin 'me' (given directly) cannot be sent to another process"),
        ("start(worker='__main__:OwnWorker')", "worker '__main__:OwnWorker' is defined in the script that runs"),
    ],
)
def test_parts_that_only_the_script_has_are_refused_with_a_remedy(start: str, error: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{SCRIPT}\n{start}\n")
    status, out, err = run([str(script)])
    assert (status, out) == (1, "top level\n")
    assert error in err
    assert "entry point in the group 'pegboard'" in err
