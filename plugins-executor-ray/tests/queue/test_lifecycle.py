"""How ranks start and end when nothing breaks, or somebody interrupts."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard.contracts.executor import ExecutorFailed
from pegboard.testing.conformance.executor import PATIENCE, plan
from pegboard.testing.rpc_worker import RpcWorker
from pegboard_executor_ray.queue_executor import RayQueueExecutor

MakeExecutor = Callable[..., RayQueueExecutor]
PluginWith = Callable[[type], dict[str, object]]
WaitUntil = Callable[..., None]
SPREAD = {"strategy": "STRICT_SPREAD"}


class Tells(RpcWorker):
    """Writes down that it was shut down, and whether in the thread that it was made in."""

    def __init__(self, config: Any, composition: Any, world: Any) -> None:
        super().__init__(config, composition, world)
        self.thread = threading.get_ident()

    def shutdown(self) -> None:
        with open(os.environ["TELLS"], "a") as file:
            file.write(f"{self.world.rank} {threading.get_ident() == self.thread}\n")


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    path = tmp_path / "told"
    path.touch()
    monkeypatch.setenv("TELLS", str(path))
    return lambda: sorted(path.read_text().splitlines())


def test_shutdown_lets_workers_shut_down_and_is_quiet(
    make_executor: MakeExecutor,
    plugin_with: PluginWith,
    told: Callable[[], list[str]],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """After the calls that run; those that wait are dropped."""
    caplog.set_level(logging.INFO)
    executor = make_executor(2, worker="own", plugins=plugin_with(Tells), options=SPREAD)
    caplog.clear()
    capfd.readouterr()
    causes: list[BaseException] = []
    executor.register_failure_callback(causes.append)
    running = executor.collective_rpc("sleep_then", (0.5, None), non_block=True)
    time.sleep(0.2)
    waiting = executor.collective_rpc("sleep_then", (600, None), non_block=True)
    executor.shutdown()
    for future in (running, waiting):
        with pytest.raises(ExecutorFailed, match="shut down"):
            future.result(PATIENCE)
    assert told() == ["0 True", "1 True"]
    time.sleep(0.5)  # what Ray prints comes late
    assert causes == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    printed = "".join(capfd.readouterr())  # Ray itself may have something to say, of a node that another test took away
    assert not [word for word in ("rank", "Traceback", "Error", "pegboard") if word in printed], printed


def test_a_rank_that_does_not_end_is_killed(
    make_executor: MakeExecutor,
    plugin_with: PluginWith,
    told: Callable[[], list[str]],
    wait_until: WaitUntil,
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = make_executor(2, worker="own", plugins=plugin_with(Tells), options={"shutdown_timeout": 0.3})

    def stubborn(worker: Any) -> None:
        Path(os.environ["TELLS"]).write_text("stubborn\n")
        time.sleep(600)

    executor.collective_rpc(stubborn, ranks=[1], non_block=True)
    wait_until(lambda: bool(told()))
    executor.shutdown()
    assert told() == ["0 True", "stubborn"]
    (stack,) = [record.message for record in caplog.records if "in the middle of a call" in record.message]
    assert stack.startswith("rank 1 ")
    assert "in stubborn" in stack


class Hangs(RpcWorker):
    """In ``load_model``, and says when it is there."""

    def load_model(self) -> None:
        if self.world.rank == 1:
            Path(os.environ["TELLS"]).write_text("hangs")
            time.sleep(600)


@pytest.mark.slow
def test_an_interrupt_while_ranks_start_leaves_nothing(
    make_executor: MakeExecutor, plugin_with: PluginWith, told: Callable[[], list[str]], wait_until: WaitUntil, groups: Any
) -> None:
    before, threads = groups(), threading.active_count()

    def interrupt() -> None:
        wait_until(lambda: bool(told()))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        make_executor(2, worker="own", plugins=plugin_with(Hangs))
    thread.join(PATIENCE)
    assert groups() == before
    assert threading.active_count() == threads


def test_what_ends_an_executor_and_what_does_not(make_executor: MakeExecutor) -> None:
    """An interrupt ends the waiting alone, the end of another executor leaves it alone; a callback may shut it down."""
    executor = make_executor(2)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        executor.collective_rpc("sleep_then", (1.0, "unheard"))
    timer.join(PATIENCE)
    assert executor.collective_rpc("echo", (1,), timeout=PATIENCE)[1]["value"] == 1

    make_executor(1).shutdown()
    assert executor.execute_model(plan(3)).step_id == 3

    done = threading.Event()
    executor.register_failure_callback(lambda cause: (executor.shutdown(), done.set()))
    with pytest.raises(ExecutorFailed, match="worker rank 1 "):
        executor.collective_rpc(lambda worker: os._exit(3), ranks=[1], timeout=PATIENCE)
    assert done.wait(4.0), "nothing waits for what waits for it"


def test_a_forgotten_executor_ends_its_ranks(open_executor: MakeExecutor, wait_until: WaitUntil) -> None:
    executor = open_executor(2)
    crew = executor._fleet._crew
    reference, fleet = weakref.ref(executor), executor._fleet
    del executor
    gc.collect()
    assert reference() is None
    assert crew is not None
    wait_until(lambda: not crew.actors)
    assert fleet._ending is not None
    fleet._ending.join(PATIENCE)
    assert not any(thread.is_alive() for thread in fleet._threads)
