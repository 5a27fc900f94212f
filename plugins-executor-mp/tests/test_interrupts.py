"""Ctrl-C, signals' handlers and finalizers at moments that do not suit."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from pegboard.contracts.executor import ExecutorFailed
from pegboard.plugins import Composition, WorkerProvider, hookimpl
from pegboard.testing.conformance.executor import PATIENCE
from pegboard.testing.interrupts import interrupt_at
from pegboard.testing.rpc_worker import RpcWorker
from pegboard_executor_mp import launch
from pegboard_executor_mp.executor import MultiprocExecutor
from pegboard_executor_mp.failure import Failure
from pegboard_executor_mp.fleet import Fleet

MakeExecutor = Callable[..., MultiprocExecutor]
ComposeMp = Callable[..., Composition]


@pytest.fixture
def nothing_more() -> Iterator[None]:
    """After the test there are no more threads, descriptors and children than before."""

    def have() -> tuple[int, int, int]:
        gc.collect()
        me = psutil.Process()
        return threading.active_count(), me.num_fds(), len(me.children(recursive=True))

    before = have()
    yield
    end = time.monotonic() + PATIENCE
    while (left := have()) > before:
        assert time.monotonic() < end, f"{left} threads, descriptors, children; before: {before}"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_more")
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.long)])
def test_a_second_interrupt_anywhere_in_shutdown_leaves_nothing(every: int, make_executor: MakeExecutor) -> None:
    line, calls = 0, []
    while True:
        executor = make_executor(2)
        calls.append(executor.collective_rpc("sleep_then", (600, None), non_block=True))
        if not interrupt_at(Fleet._end, line, executor.shutdown):
            break
        line += every
    assert line > 9
    for call in calls:
        with pytest.raises(ExecutorFailed):
            call.result(PATIENCE)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_more")
def test_an_interrupt_anywhere_in_a_start_leaves_nothing(compose_mp: ComposeMp) -> None:
    composition = compose_mp(2)
    for function, every in ((Fleet.start, 2), (Fleet.greet, 15)):
        line = 0
        while interrupt_at(function, line, lambda: composition.create("executor").shutdown()):
            line += every
        assert line > 3


@pytest.mark.usefixtures("nothing_more")
def test_a_thread_that_cannot_be_started_leaves_nothing(compose_mp: ComposeMp, monkeypatch: pytest.MonkeyPatch) -> None:
    composition = compose_mp(2)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("pegboard-mp-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        composition.create("executor")


@pytest.mark.parametrize("size", [1, 100_000])
def test_shutdown_by_a_signals_handler_in_the_middle_of_a_call(size: int, make_executor: MakeExecutor) -> None:
    """The call waits for its answer, or for room in the queue."""
    executor = make_executor(1, options={"chunk_bytes": 1024, "num_chunks": 1, "shutdown_timeout": 0.2})
    executor.collective_rpc("sleep_then", (600, None), non_block=True)
    before = signal.signal(signal.SIGALRM, lambda *_: executor.shutdown())
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(ExecutorFailed, match="was shut down"):
            executor.collective_rpc("echo", (b"x" * size,))
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_finalizer_may_close_in_the_middle_of_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = Failure()
    done: list[bool] = []

    class Callbacks(list[Any]):
        def append(self, callback: Any) -> None:
            failure.close()

    failure._callbacks = Callbacks()
    thread = threading.Thread(target=lambda: (failure.register(print), done.append(failure.wait(0))), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert done == [True]


def test_shutdown_from_a_callback_of_a_call(make_executor: MakeExecutor) -> None:
    executor = make_executor(3)
    done = threading.Event()
    call = executor.collective_rpc("sleep_then", (0.2, None), non_block=True)
    last = executor.collective_rpc("sleep_then", (0.2, None), non_block=True)
    call.add_done_callback(lambda _: (executor.shutdown(), done.set()))
    assert done.wait(PATIENCE)
    with pytest.raises(ExecutorFailed, match="was shut down"):
        last.result(PATIENCE)


def test_a_process_forked_while_ranks_start_does_not_hold_them_up(
    make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the pipes through which they say that they are ready, or are gone."""

    class EndsAtOnce(RpcWorker):
        def __init__(self, config: Any, composition: Any, world: Any) -> None:
            os._exit(5)

    class Plugin:
        @hookimpl
        def workers(self) -> list[WorkerProvider]:
            return [WorkerProvider(name="own", target=EndsAtOnce)]

    start, forked = launch._start, []

    def fork_too(*args: Any) -> Any:
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
            os._exit(0)
        forked.append(pid)
        return start(*args)

    monkeypatch.setattr(launch, "_start", fork_too)
    try:
        make_executor(2, options={"start_timeout": PATIENCE}).shutdown()
        with pytest.raises(ExecutorFailed, match="exit status 5"):
            make_executor(2, worker="own", plugins={"own": Plugin()}, options={"start_timeout": PATIENCE})
    finally:
        for pid in forked:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
