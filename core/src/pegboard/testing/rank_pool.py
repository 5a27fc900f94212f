"""RankPool: processes that stay and run functions as ranks, so that a test need not wait for an interpreter to start."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing as mp
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle


@dataclass(frozen=True)
class Outcome:
    """Of one rank's function: what it returned, or the traceback of what it raised, or the signal that ended its process."""

    value: Any = None
    error: str | None = None
    signal: int | None = None


class RankPool:
    """``size`` processes, started with "spawn" when they are first needed, which import the modules ``preload``; one that was
    killed is replaced. All are ready before any is told to run something."""

    def __init__(self, size: int, preload: Sequence[str] = ()) -> None:
        self.size, self._preload = size, tuple(preload)
        self._ranks: list[tuple[Any, Connection]] = []
        self._context = mp.get_context("spawn")
        atexit.register(self.close)

    def run(self, calls: Sequence[tuple[Any, ...]], timeout: float) -> list[Any]:
        """``calls[i]``, a function and its arguments, on process i, all at once. What they return; errors are raised here."""
        outcomes = self.outcomes(calls, timeout)
        failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.error or outcome.signal]
        if failed:
            raise AssertionError(
                "\n".join(f"rank {rank}: {outcome.error or f'ended by signal {outcome.signal}'}" for rank, outcome in failed)
            )
        return [outcome.value for outcome in outcomes]

    def outcomes(self, calls: Sequence[tuple[Any, ...]], timeout: float) -> list[Outcome]:
        """As ``run``, but whatever comes of it. Raises ``TimeoutError`` for ranks that hang, and kills them."""
        assert len(calls) <= self.size, f"{len(calls)} calls for {self.size} processes"
        self._fill(timeout)
        for (_, pipe), call in zip(self._ranks, calls, strict=False):
            pipe.send_bytes(_pickle(call))
        deadline = time.monotonic() + timeout
        return [self._outcome(rank, deadline) for rank in range(len(calls))]

    def close(self) -> None:
        ranks, self._ranks = self._ranks, []
        for process, pipe in ranks:
            pipe.close()
            process.kill()
            process.join()

    def _fill(self, timeout: float) -> None:
        alive = [(process, pipe) for process, pipe in self._ranks if process.is_alive()]
        for _ in range(self.size - len(alive)):
            own, other = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(other, self._preload), daemon=True)
            process.start()
            other.close()
            alive.append((process, own))
        fresh = [end for end in alive if end not in self._ranks]
        self._ranks = alive
        for _, pipe in fresh:
            if not pipe.poll(timeout):
                self.close()
                raise TimeoutError(f"a process has not started within {timeout:g} s")
            pipe.recv_bytes()

    def _outcome(self, rank: int, deadline: float) -> Outcome:
        process, pipe = self._ranks[rank]
        try:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                self.close()
                raise TimeoutError(f"rank {rank} hangs")
            outcome = pickle.loads(pipe.recv_bytes())
            assert isinstance(outcome, Outcome)
            return outcome
        except (EOFError, ConnectionResetError):
            process.join()
            return Outcome(signal=-process.exitcode)


def _pickle(call: tuple[Any, ...]) -> bytes:
    """A test's module cannot be imported by its name elsewhere, so its functions go by value."""
    module = sys.modules[call[0].__module__]
    if not module.__name__.startswith("pegboard"):
        cloudpickle.register_pickle_by_value(module)
    data = cloudpickle.dumps(call)
    assert isinstance(data, bytes)
    return data


def _serve(pipe: Connection, preload: Sequence[str]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    for module in preload:
        importlib.import_module(module)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        pipe.send_bytes(b"ready")
        while True:
            pipe.send_bytes(pickle.dumps(_run(*pickle.loads(pipe.recv_bytes()))))


def _run(function: Callable[..., Any], *args: Any) -> Outcome:
    try:
        return Outcome(value=function(*args))
    except BaseException:
        return Outcome(error=traceback.format_exc())
