"""Functions, closures too, that a test runs in processes of its own."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import cloudpickle

PATIENCE = 60.0
"""Seconds after which a child that does not report counts as hung."""


class Child:
    """A process and this end of a pipe to it."""

    def __init__(self, function: Callable[[Any], Any], start_method: str) -> None:
        context = multiprocessing.get_context(start_method)
        self.connection, there = context.Pipe()
        self.process = context.Process(target=_run, args=(cloudpickle.dumps(function), there), daemon=True)  # type: ignore[attr-defined]
        self.process.start()
        there.close()

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def received(self) -> Any:
        """What the child sent next."""
        assert self.connection.poll(PATIENCE), "a child process did not report"
        return self.connection.recv()

    def send(self, value: Any) -> None:
        self.connection.send(value)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.process.kill()
        self.process.join(PATIENCE)
        self.connection.close()


@contextlib.contextmanager
def children(
    *functions: Callable[[Any], Any], by_value: Iterable[str] = (), start_method: str = "spawn"
) -> Iterator[list[Child]]:
    """Each function runs in a new process and gets its end of a pipe as its argument. At the end the processes are killed.

    ``by_value`` names modules that the processes cannot import, as pytest made them: their functions and classes travel by
    value. Those of the functions themselves always do.
    """
    for name in {*by_value, *(_module(function) for function in functions)}:
        if name in sys.modules and not name.startswith("pegboard."):
            cloudpickle.register_pickle_by_value(sys.modules[name])
    started: list[Child] = []
    try:
        for function in functions:
            started.append(Child(function, start_method))
        yield started
    finally:
        for child in started:
            with contextlib.suppress(OSError):
                child.kill()


def _module(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(function.__module__)


def _run(function: bytes, connection: Any) -> None:
    pickle.loads(function)(connection)
