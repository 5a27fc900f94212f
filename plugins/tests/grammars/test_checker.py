"""Grammars are compiled in processes that can be stopped; verdicts are remembered."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from pegboard.wire import GrammarSpec
from pegboard_plugins.grammars import check_process, checker
from pegboard_plugins.grammars.checker import Checker

GOOD, BAD = GrammarSpec("regex", "ab*"), GrammarSpec("regex", "(")


@pytest.fixture
def fresh() -> Iterable[Checker]:
    fresh = Checker()
    yield fresh
    fresh.close()


def test_a_process_is_kept_and_verdicts_are_remembered(fresh: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.check(GOOD, "fixed")
    with pytest.raises(ValueError, match="unclosed group"):
        fresh.check(BAD, "fixed")
    [process] = fresh._idle
    fresh.check(GrammarSpec("regex", "c"), "fixed")
    assert fresh._idle == [process]
    monkeypatch.setattr(fresh, "_ask", lambda job: pytest.fail("it is known"))
    fresh.check(GOOD, "fixed")
    with pytest.raises(ValueError, match="unclosed group"):
        fresh.check(BAD, "fixed")
    monkeypatch.setattr(checker, "REMEMBERED", 1)
    monkeypatch.setattr(fresh, "_ask", lambda job: "as asked")
    with pytest.raises(ValueError, match="as asked"):
        fresh.check(GOOD, "any")
    assert len(fresh._verdicts) == 1


def test_close_ends_the_processes(fresh: Checker) -> None:
    fresh.check(GOOD, "fixed")
    [process] = fresh._idle
    fresh.close()
    assert process.returncode is not None
    assert process.stdin is not None
    assert process.stdin.closed


def test_a_process_that_has_died_is_replaced(fresh: Checker) -> None:
    fresh.check(GOOD, "fixed")
    [process] = fresh._idle
    process.kill()
    process.wait()
    fresh.check(GrammarSpec("regex", "c"), "fixed")
    assert fresh._idle[0].pid != process.pid


def test_a_process_that_has_just_ended_of_idleness_is_replaced(fresh: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.check(GOOD, "fixed")
    [process] = fresh._idle
    with monkeypatch.context() as patch:  # seen alive when it is taken, and gone when it is asked
        patch.setattr(process, "poll", lambda: None)
        os.kill(process.pid, signal.SIGALRM)
        fresh.check(GrammarSpec("regex", "c"), "fixed")
    assert process.returncode == -signal.SIGALRM
    assert fresh._idle[0].pid != process.pid


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (f"os.kill(os.getpid(), {int(signal.SIGPROF)})", "takes longer than 3 s"),
        ("os.abort()", "takes more than 1024 MiB"),
    ],
)
def test_how_a_process_ends_is_the_verdict(fresh: Checker, monkeypatch: pytest.MonkeyPatch, code: str, told: str) -> None:
    started = []

    def start() -> subprocess.Popen[bytes]:
        started.append(code)
        program = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); sys.stdin.readline(); {code}"
        return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr(checker, "_start", start)
    for _ in range(2):
        with pytest.raises(ValueError, match=told):
            fresh.check(GOOD, "fixed")
    assert len(started) == 1, "it is not tried twice"


def test_another_end_is_no_verdict(fresh: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    with monkeypatch.context() as patch:
        patch.setattr(checker, "_start", start)
        with pytest.raises(ValueError, match="ended with 3; try again"):
            fresh.check(GOOD, "fixed")
    fresh.check(GOOD, "fixed")


def test_many_threads_ask_at_once(fresh: Checker) -> None:
    def ask(i: int) -> str:
        try:
            fresh.check(GrammarSpec("regex", f"a{{{i}" + "}" * (i % 2)), "fixed")
        except ValueError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(1, 33)))
    assert [bool(answer) for answer in answers] == [i % 2 == 0 for i in range(1, 33)]
    assert 1 <= len(fresh._idle) <= checker.MAX_PROCESSES


def test_the_process_ends_with_its_parent() -> None:
    code = (
        "from pegboard_plugins.grammars.checker import Checker; from pegboard.wire import GrammarSpec; import os; c = Checker();"
        "c.check(GrammarSpec('regex', 'a'), 'fixed'); print(c._idle[0].pid, flush=True); os.kill(os.getpid(), 9)"
    )
    child = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout)
    until = time.monotonic() + 30
    while _alive(child):
        assert time.monotonic() < until
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_whatever_happens_there_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_process.check("regex", "a", "fixed") == ""
    for error, told in ((MemoryError(), "more than 1024 MiB"), (KeyError("odd"), "odd"), (RuntimeError(), "RuntimeError")):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(check_process, "start_matcher", fail)
        assert told in check_process.check("regex", "a", "fixed")
