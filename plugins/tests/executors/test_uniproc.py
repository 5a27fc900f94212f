from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from pegboard.config import EngineConfig, ExecutorConfig
from pegboard.contracts.executor import Executor, WorkerError
from pegboard.testing.conformance.executor import PATIENCE, ExecutorConformance, plan
from pegboard.testing.rpc_worker import RpcWorker
from pegboard_plugins.executors.uniproc import UniProcExecutor


def make(worker: Any = RpcWorker, **executor: Any) -> UniProcExecutor:
    config = EngineConfig(model="fake", executor=ExecutorConfig(**executor))
    composition = SimpleNamespace(create=lambda kind, world: worker(config, None, world))
    return UniProcExecutor(config, composition)  # type: ignore[arg-type]


class TestUniProc(ExecutorConformance):
    def make(self, *, step_timeout: float | None = None) -> Executor:
        return make(step_timeout=step_timeout)

    def break_for_good(self, executor: Executor) -> None:
        """A worker in this process is lost by hanging."""
        with pytest.raises(TimeoutError):
            executor.execute_model(plan(1, sleep=1.0))


def test_several_ranks_are_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"runs one worker.*is 6.*executor\.name"):
        make(tensor_parallel_size=2, pipeline_parallel_size=3)


def test_a_worker_that_cannot_load_is_told_and_leaves_no_thread() -> None:
    class Broken(RpcWorker):
        def load_model(self) -> None:
            raise ValueError("file x is truncated")

    before = threading.active_count()
    with pytest.raises(WorkerError, match="ValueError: file x is truncated"):
        make(Broken)
    assert threading.active_count() == before


def test_all_calls_run_on_one_thread_and_may_nest() -> None:
    executor = make()

    def nested(worker: Any) -> tuple[int, Any]:
        return threading.get_ident(), executor.collective_rpc(lambda _: threading.get_ident(), timeout=PATIENCE)[0]

    outer, inner = executor.collective_rpc(nested)[0]
    assert outer == inner != threading.get_ident()
    executor.shutdown()


def test_a_call_that_timed_out_before_it_started_never_runs() -> None:
    executor = make()
    ran: list[int] = []
    executor.collective_rpc("sleep_then", (0.3, None), non_block=True)
    with pytest.raises(TimeoutError):
        executor.collective_rpc(lambda _: ran.append(1), timeout=0.05)
    executor.collective_rpc("echo", (1,))
    assert ran == []
    executor.shutdown()


def test_shutdown_ends_the_worker_once() -> None:
    executor = make()
    worker = executor._worker
    executor.shutdown()
    executor.shutdown()
    assert worker.calls.count("shutdown") == 1


def test_a_forgotten_executor_ends_its_thread() -> None:
    executor = make()
    thread, reference = executor._thread._thread, weakref.ref(executor)
    del executor
    gc.collect()
    thread.join(PATIENCE)
    assert reference() is None
    assert not thread.is_alive()
