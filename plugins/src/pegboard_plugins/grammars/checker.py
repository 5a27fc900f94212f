"""Checker: has grammars compiled where they can do no harm.

The library limits what a mask costs, and most of what compiling costs, but not all: whether thirteen regular expressions have a
text in common takes it minutes and gigabytes. A thread that computes that cannot be stopped, a process can.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from typing import Final

from pegboard.wire import GrammarSpec
from pegboard_plugins.grammars.limits import CHECK_MEMORY, CHECK_SECONDS

MAX_PROCESSES: Final = 4
"""Grammars checked at once."""
REMEMBERED: Final = 1024
"""Grammars whose verdict is kept."""
GOOD: Final = ""
"""The verdict on a grammar that can be served; any other says why not."""

Process = subprocess.Popen[bytes]


class Checker:
    """Starts processes as they are needed and keeps them; one that is not asked for a while ends by itself. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(MAX_PROCESSES)
        self._idle: list[Process] = []
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self.close = weakref.finalize(self, _end, self._idle)
        """End the processes that wait."""

    def check(self, spec: GrammarSpec, whitespace: str) -> None:
        """Raises ``ValueError`` for a grammar that the library does not take, or that takes too long or too much memory."""
        job = json.dumps({"kind": spec.kind, "text": spec.text, "whitespace": whitespace}).encode() + b"\n"
        key = hashlib.sha256(job).digest()
        found = self._remembered(key)
        if found is None:
            with self._turns:
                found = self._ask(job)
            self._remember(key, found)
        if found != GOOD:
            raise ValueError(found)

    def _remembered(self, key: bytes) -> str | None:
        with self._lock:
            found = self._verdicts.get(key)
            if found is not None:
                self._verdicts.move_to_end(key)
            return found

    def _remember(self, key: bytes, verdict: str) -> None:
        with self._lock:
            self._verdicts[key] = verdict
            while len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)

    def _ask(self, job: bytes) -> str:
        process = self._take()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(job)
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:  # it died before it was asked
            answer = b""
        except BaseException:  # an interrupt: the answer that is still to come would be taken for the next grammar's
            _end([process])
            raise
        if not answer:
            process.wait()
            _end([process])
            return self._ask(job) if process.returncode == -signal.SIGALRM else _why_ended(process.returncode)
        with self._lock:
            self._idle.append(process)
        verdict: str = json.loads(answer)
        return verdict

    def _take(self) -> Process:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
                _end([process])
        return _start()


@functools.cache
def checker() -> Checker:
    """One for the whole process: what a front end has checked, an engine beside it need not check again."""
    return Checker()


def _start() -> Process:
    import llguidance  # noqa: F401 - where it is missing, this process can say so

    command = [sys.executable, "-m", "pegboard_plugins.grammars.check_process"]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )


def _why_ended(returncode: int) -> str:
    """The verdict on a grammar that ended its process. Raises ``ValueError`` where that may have been another's doing."""
    if returncode == -signal.SIGPROF:
        return f"it takes longer than {CHECK_SECONDS:g} s to compile; make it simpler"
    if returncode == -signal.SIGABRT:
        return f"compiling it takes more than {CHECK_MEMORY >> 20} MiB; make it simpler"
    raise ValueError(f"the process that checks it ended with {returncode}; try again")


def _end(processes: list[Process]) -> None:
    while processes:
        process = processes.pop()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what is left to be written has no reader any more
                    pipe.close()
