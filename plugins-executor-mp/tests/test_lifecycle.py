"""How ranks start and end. What happens when they break is in tests/faults at the repository's root."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from pegboard.contracts.communicator import PeerLost
from pegboard.contracts.executor import ExecutorFailed, WorkerError
from pegboard.plugins import Composition, WorkerProvider, hookimpl
from pegboard.testing.conformance.executor import PATIENCE
from pegboard.testing.rpc_worker import RpcWorker
from pegboard_executor_mp import fleet
from pegboard_executor_mp.executor import MultiprocExecutor
from pegboard_executor_mp.monitor import how_it_ended

MakeExecutor = Callable[..., MultiprocExecutor]


def plugin_with(worker: type) -> dict[str, object]:
    """A plugin given directly that offers ``worker``, which goes to the ranks by value."""

    class Plugin:
        @hookimpl
        def workers(self) -> list[WorkerProvider]:
            return [WorkerProvider(name="own", target=worker)]

    return {"own": Plugin()}


@pytest.fixture(autouse=True)
def _by_value() -> Any:
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


# -- starting ----------------------------------------------------------------------------------------------------------


class CannotBeMade(RpcWorker):
    def __init__(self, config: Any, composition: Any, world: Any) -> None:
        if world.rank == 1:
            raise ValueError("odd-17: no such device")
        super().__init__(config, composition, world)


class CannotLoad(RpcWorker):
    def load_model(self) -> None:
        if self.world.rank == 1:
            raise ValueError("odd-17: the file is truncated")


class EndsAtOnce(RpcWorker):
    def __init__(self, config: Any, composition: Any, world: Any) -> None:
        os._exit(5)


class Hangs(RpcWorker):
    def __init__(self, config: Any, composition: Any, world: Any) -> None:
        time.sleep(600 if world.rank else 0)
        super().__init__(config, composition, world)


def makes_something_else_of_sigterm(*_: Any) -> None:
    """As code does that catches everything and raises an error of its own."""
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    except BaseException as error:
        raise ValueError("this plugin is broken") from error


class EndedAsItIsMade(RpcWorker):
    def __init__(self, config: Any, composition: Any, world: Any) -> None:
        if world.rank == 1:
            makes_something_else_of_sigterm()
        super().__init__(config, composition, world)


def test_sigterm_is_the_cause_whatever_becomes_of_it(make_executor: MakeExecutor) -> None:
    told = r"worker rank 1 \(process \d+\) was ended by SIGTERM"
    with pytest.raises(ExecutorFailed, match=told):
        make_executor(2, worker="own", plugins=plugin_with(EndedAsItIsMade))
    with pytest.raises(ExecutorFailed, match=told):
        make_executor(2).collective_rpc(makes_something_else_of_sigterm, ranks=[1], timeout=PATIENCE)


@pytest.mark.parametrize("worker", [CannotBeMade, CannotLoad])
def test_what_a_rank_raises_at_the_start_is_raised_here(worker: type, make_executor: MakeExecutor) -> None:
    threads = threading.active_count()
    with pytest.raises(WorkerError, match=r"worker rank 1 failed: ValueError: odd-17") as caught:
        make_executor(2, worker="own", plugins=plugin_with(worker))
    assert caught.value.traceback_text.count("Traceback") == 1
    assert f", in {'__init__' if worker is CannotBeMade else 'load_model'}\n" in caught.value.traceback_text
    assert threading.active_count() == threads


def test_a_rank_that_ends_at_the_start(make_executor: MakeExecutor) -> None:
    with pytest.raises(ExecutorFailed, match=r"worker rank \d \(process \d+\) ended with exit status 5"):
        make_executor(2, worker="own", plugins=plugin_with(EndsAtOnce))


def test_a_rank_that_hangs_at_the_start(make_executor: MakeExecutor) -> None:
    with pytest.raises(TimeoutError, match=r"start_timeout=2\.5 s: no sign of rank 1"):
        make_executor(2, worker="own", plugins=plugin_with(Hangs), options={"start_timeout": 2.5})


def test_an_interrupt_while_ranks_start_leaves_nothing(make_executor: MakeExecutor) -> None:
    def interrupt() -> None:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        make_executor(2, worker="own", plugins=plugin_with(Hangs))


# -- ending ------------------------------------------------------------------------------------------------------------


class Tells(RpcWorker):
    """Says on stdout what happens to it."""

    def shutdown(self) -> None:
        print("worker shut down", flush=True)


def test_shutdown_lets_workers_shut_down(make_executor: MakeExecutor, capfd: pytest.CaptureFixture[str]) -> None:
    executor = make_executor(2, worker="own", plugins=plugin_with(Tells))
    executor.collective_rpc(lambda worker: __import__("atexit").register(print, "at exit"))
    executor.shutdown()
    out, err = capfd.readouterr()
    for rank in range(2):
        assert err.count(f"[rank {rank}] worker shut down\n") == err.count(f"[rank {rank}] at exit\n") == 1
    assert out == "", "the program's own output stays clean"


def test_a_normal_end_is_quiet(make_executor: MakeExecutor, caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    caplog.set_level(logging.INFO)
    executor = make_executor(2)
    told: list[BaseException] = []
    executor.register_failure_callback(told.append)
    executor.collective_rpc("echo", (1,))
    executor.shutdown()
    assert told == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_does_not_end_is_killed(make_executor: MakeExecutor) -> None:
    """It computes for ever and has SIGTERM blocked."""
    executor = make_executor(2, options={"shutdown_timeout": 0.2})

    def stubborn(worker: Any) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        while True:
            pass

    call = executor.collective_rpc(stubborn, ranks=[1], non_block=True)
    executor.shutdown()
    with pytest.raises(ExecutorFailed, match="shut down"):
        call.result(PATIENCE)


def test_calls_that_wait_for_room_end_with_the_executor(make_executor: MakeExecutor) -> None:
    executor = make_executor(1, options={"chunk_bytes": 1024, "num_chunks": 1, "shutdown_timeout": 0.2})
    executor.collective_rpc("sleep_then", (600, None), non_block=True)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            executor.collective_rpc("echo", (b"x" * 100_000,))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.2)
    executor.shutdown()
    thread.join(PATIENCE)
    assert [type(error) for error in errors] == [ExecutorFailed]


def test_shutdown_from_a_failure_callback(make_executor: MakeExecutor) -> None:
    executor = make_executor(2)
    done = threading.Event()
    executor.register_failure_callback(lambda cause: (executor.shutdown(), done.set()))
    with pytest.raises(ExecutorFailed, match="exit status 3"):
        executor.collective_rpc(lambda worker: os._exit(3), ranks=[1], timeout=PATIENCE)
    assert done.wait(PATIENCE)


def test_a_forgotten_executor_ends_its_ranks(compose_mp: Callable[..., Composition]) -> None:
    executor = compose_mp(2).create("executor")
    ranks = [psutil.Process(pid) for pid in executor.collective_rpc(lambda worker: os.getpid())]
    reference = weakref.ref(executor)
    del executor
    gc.collect()
    assert reference() is None
    assert psutil.wait_procs(ranks, PATIENCE)[1] == []


def test_sigterm_ends_a_rank_after_its_worker_was_shut_down(make_executor: MakeExecutor, capfd: Any) -> None:
    executor = make_executor(2, worker="own", plugins=plugin_with(Tells))
    causes: list[BaseException] = []
    ended = threading.Event()
    executor.register_failure_callback(lambda cause: (causes.append(cause), ended.set()))
    pid = executor.collective_rpc(lambda worker: os.getpid())[1]
    os.kill(pid, signal.SIGTERM)
    assert ended.wait(PATIENCE)
    assert str(causes[0]) == f"worker rank 1 (process {pid}) was ended by SIGTERM"
    executor.shutdown()
    assert capfd.readouterr().err.count("[rank 1] worker shut down\n") == 1


class NeverShutDown(RpcWorker):
    def shutdown(self) -> None:
        time.sleep(600)


def test_a_rank_that_leaves_but_does_not_end_is_lost(make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "VERDICT_SECONDS", 0.5)
    executor = make_executor(2, worker="own", plugins=plugin_with(NeverShutDown))
    pid = executor.collective_rpc(lambda worker: os.getpid())[1]
    call = executor.collective_rpc("sleep_then", (600, None), non_block=True)
    os.kill(pid, signal.SIGTERM)
    with pytest.raises(ExecutorFailed, match=rf"worker rank 1 \(process {pid}\) has left, but does not end"):
        call.result(PATIENCE)


class EndsSlowly(RpcWorker):
    def shutdown(self) -> None:
        time.sleep(0.5)


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("SIGTERM", r"worker rank 1 \(process \d+\) was ended by SIGTERM"),
        ("raise", "worker rank 1 failed: ValueError: odd-17"),
    ],
)
def test_a_rank_that_misses_another_one_is_not_the_cause(what: str, cause: str, make_executor: MakeExecutor) -> None:
    executor = make_executor(2, worker="own", plugins=plugin_with(EndsSlowly))

    def call(worker: Any) -> None:
        if worker.world.rank == 0:
            time.sleep(0.2)
            raise PeerLost("rank 1 has left the group")
        if what == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.4)
        raise ValueError("odd-17")

    with pytest.raises((WorkerError, ExecutorFailed), match=cause):
        executor.collective_rpc(call, timeout=PATIENCE)


def test_how_a_process_ended() -> None:
    assert how_it_ended(3 << 8) == "ended with exit status 3"
    assert how_it_ended(signal.SIGTERM) == "was ended by SIGTERM"
    assert how_it_ended(signal.SIGKILL) == "was ended by SIGKILL (as the kernel does when memory runs out)"
    assert how_it_ended(signal.SIGSEGV | 0x80).startswith("was ended by SIGSEGV (")
    assert how_it_ended(signal.SIGRTMIN + 3) == f"was ended by signal {signal.SIGRTMIN + 3}"


def test_ranks_that_crash_show_where(make_executor: MakeExecutor, capfd: pytest.CaptureFixture[str]) -> None:
    executor = make_executor(2)

    def crash(worker: Any) -> None:
        import ctypes

        ctypes.string_at(0)

    with pytest.raises(ExecutorFailed, match=r"worker rank 0 .* was ended by SIGSEGV"):
        executor.collective_rpc(crash, ranks=[0], timeout=PATIENCE)
    assert "in crash" in capfd.readouterr().err


@pytest.mark.slow
def test_the_end_of_the_interpreter_is_the_end_of_the_ranks(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom pegboard import LLM\nfrom pegboard.testing.ranked_model import RankedPlugin\n"
        "llm = LLM('scripted', plugins={'ranked': RankedPlugin(), 'executor_mp': {'preload': []}}, executor={'name': 'mp', "
        "'worker': 'pegboard.testing.fakes:RunnerWorker', 'tensor_parallel_size': 2}, max_model_len=64)\n"
        "print(llm.collective_rpc(lambda worker: os.getpid()))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=PATIENCE, check=True)
    pids = eval(done.stdout)
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
