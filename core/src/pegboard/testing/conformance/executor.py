"""What every executor must keep. Subclass ``ExecutorConformance``, give ``make`` and, where needed, ``break_for_good``.

``make`` returns an executor whose workers are ``pegboard.testing.rpc_worker:RpcWorker``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pegboard.contracts.executor import Executor, ExecutorFailed, WorkerError
from pegboard.testing.rpc_worker import RpcWorker
from pegboard.wire import KVCacheConfig, KVCacheGroup, SchedulerOutput

PATIENCE = 60.0
"""Seconds after which a call of a test counts as hung."""


class NeedsTwoArguments(Exception):
    """Pickles, but cannot be loaded: ``__init__`` wants more than it passes on."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


class HoldsALock(Exception):
    """Cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


def _raise_two_arguments(_: Any) -> None:
    raise NeedsTwoArguments("odd-17", "more")


def _raise_with_lock(_: Any) -> None:
    raise HoldsALock("odd-17")


def _raise_long(_: Any) -> None:
    raise ValueError("odd-17" + "x" * 5_000_000)


def _raise_interrupt(_: Any) -> None:
    raise KeyboardInterrupt("odd-17")


def _raise_exit(_: Any) -> None:
    raise SystemExit("odd-17")


def plan(step_id: int, *, rows: int = 1, **wishes: Any) -> SchedulerOutput:
    """A step of ``rows`` decoding requests; ``wishes`` tell the worker what to do (see ``RpcWorker``)."""
    ones = [1] * rows
    return SchedulerOutput(
        step_id=step_id,
        slots=list(range(rows)),
        num_scheduled_tokens=ones,
        num_computed_tokens=ones,
        num_to_sample=ones,
        ext={"rpc": wishes} if wishes else {},
    )


class ExecutorConformance:
    """The contract of ``pegboard.contracts.executor``, as tests."""

    def make(self, *, step_timeout: float | None = None) -> Executor:
        """A booted executor of ``RpcWorker``s."""
        raise NotImplementedError("a subclass gives the executor under test")

    def break_for_good(self, executor: Executor) -> None:
        """Lose a worker: by default its process ends."""
        with pytest.raises((WorkerError, ExecutorFailed)):
            executor.collective_rpc(lambda worker: os._exit(3), timeout=PATIENCE)

    @pytest.fixture
    def executor(self) -> Iterator[Executor]:
        executor = self.make()
        yield executor
        executor.shutdown()

    # -- calls -------------------------------------------------------------------------------------------------------

    def test_boots_device_and_model_phases(self, executor: Executor) -> None:
        for calls in executor.collective_rpc("called"):
            assert calls == ["init_device", "load_model"]
        group = KVCacheGroup(layers=["layer"], spec=RpcWorker.SPEC)
        assert len(executor.determine_available_memory()) == len(executor.get_kv_cache_specs()) == executor.world.size
        executor.initialize_from_config(KVCacheConfig(num_blocks=4, groups=[group]))
        for calls in executor.collective_rpc("called"):
            assert calls[2:] == ["determine_available_memory", "initialize_cache", "compile_or_warm_up"]

    def test_replies_come_in_rank_order(self, executor: Executor) -> None:
        ranks = range(executor.world.size)
        expected = [{"rank": rank, "value": 1, "more": 2} for rank in ranks]
        assert executor.collective_rpc("echo", (1,), {"more": 2}, timeout=PATIENCE) == expected
        backwards = list(reversed(ranks))
        replies = executor.collective_rpc("echo", (1,), ranks=backwards)
        assert [reply["rank"] for reply in replies] == backwards

    def test_callables_get_the_worker(self, executor: Executor) -> None:
        table = {"a": 5}
        pids = executor.collective_rpc(lambda worker: os.getpid())
        assert len(pids) == executor.world.size
        assert executor.collective_rpc(lambda worker, x, y: (worker.world.rank, table["a"] + x * y), (2,), {"y": 3}) == [
            (rank, 11) for rank in range(executor.world.size)
        ]

    def test_a_local_class_comes_back(self, executor: Executor) -> None:
        def local(worker: Any) -> Any:
            class Local:
                value = 17

            return Local()

        assert [reply.value for reply in executor.collective_rpc(local)] == [17] * executor.world.size

    def test_undeclared_methods_are_refused(self, executor: Executor) -> None:
        with pytest.raises(AttributeError, match="echo"):
            executor.collective_rpc("ecko", (1,))
        for name in ("undeclared", "__init__", "config", "rpc.halve"):
            with pytest.raises(AttributeError, match="not a declared worker method"):
                executor.collective_rpc(name)

    def test_extension_methods_have_a_namespace(self, executor: Executor) -> None:
        assert executor.collective_rpc("rpc.double", (21,)) == [42] * executor.world.size

    def test_late_replies_are_dropped(self, executor: Executor) -> None:
        with pytest.raises(TimeoutError):
            executor.collective_rpc("sleep_then", (1.0, "late"), timeout=0.1)
        assert executor.collective_rpc("sleep_then", (0.0, "own"), timeout=PATIENCE) == ["own"] * executor.world.size
        future = executor.collective_rpc("sleep_then", (0.5, "late"), timeout=0.1, non_block=True)
        with pytest.raises(TimeoutError):
            future.result(PATIENCE)
        assert executor.collective_rpc("echo", ("own",), timeout=PATIENCE)[0]["value"] == "own"

    def test_futures_may_be_taken_in_any_order(self, executor: Executor) -> None:
        futures = [executor.collective_rpc("echo", (i,), non_block=True) for i in range(5)]
        values = {i: futures[i].result(PATIENCE)[0]["value"] for i in (3, 0, 4, 1, 2)}
        assert all(key == value for key, value in values.items())

    # -- errors ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("function", "name"),
        [
            (_raise_two_arguments, "NeedsTwoArguments"),
            (_raise_with_lock, "HoldsALock"),
            (_raise_long, "ValueError"),
            (_raise_interrupt, "KeyboardInterrupt"),
            (_raise_exit, "SystemExit"),
        ],
    )
    def test_errors_of_any_kind_are_told(self, executor: Executor, function: Any, name: str) -> None:
        with pytest.raises(WorkerError, match="odd-17") as caught:
            executor.collective_rpc(function, timeout=PATIENCE)
        assert caught.value.error_type == name
        assert len(str(caught.value)) < 100_000
        assert function.__name__ in caught.value.traceback_text
        assert executor.collective_rpc("echo", (1,), timeout=PATIENCE)[0]["value"] == 1

    def test_an_error_on_any_rank_fails_the_step(self, executor: Executor) -> None:
        for rank in range(executor.world.size):
            wish: dict[str, Any] = {"raise": "boom-17", "rank": rank}
            with pytest.raises(WorkerError, match="boom-17") as caught:
                executor.execute_model(plan(rank, **wish))
            assert caught.value.rank == rank

    def test_failure_callbacks_run_once(self) -> None:
        executor = self.make(step_timeout=0.2)
        early: list[BaseException] = []
        late: list[BaseException] = []
        executor.register_failure_callback(early.append)
        self.break_for_good(executor)
        _wait_for(lambda: bool(early))
        executor.register_failure_callback(late.append)
        _wait_for(lambda: bool(late))
        for call in (lambda: executor.collective_rpc("echo", (1,), timeout=PATIENCE), executor.check_health):
            with pytest.raises((ExecutorFailed, WorkerError)):
                call()
        executor.shutdown()
        assert (len(early), len(late)) == (1, 1)

    # -- steps -------------------------------------------------------------------------------------------------------

    def test_steps(self, executor: Executor) -> None:
        output = executor.execute_model(plan(1, rows=3))
        assert (output.step_id, output.slots, output.sampled_token_ids) == (1, [0, 1, 2], [[7], [7], [7]])
        futures = [executor.execute_model(plan(i, sleep=0.01), non_block=True) for i in range(2, 6)]
        assert [future.result(PATIENCE).step_id for future in futures] == [2, 3, 4, 5]

    def test_steps_in_two_halves(self, executor: Executor) -> None:
        masked = plan(1)
        masked.grammar_slots = [0]
        assert executor.execute_model(masked) is None
        assert executor.sample_tokens(None).step_id == 1

    def test_calls_from_a_thread_do_not_disturb_steps(self, executor: Executor) -> None:
        replies: list[Any] = []

        def many() -> None:
            for i in range(100):
                replies.append(executor.collective_rpc("echo", (i,), timeout=PATIENCE)[0]["value"])

        thread = threading.Thread(target=many)
        thread.start()
        steps = [executor.execute_model(plan(i, sleep=0.001)).step_id for i in range(50)]
        thread.join(PATIENCE)
        assert steps == list(range(50))
        assert replies == list(range(100))

    # -- the end -----------------------------------------------------------------------------------------------------

    def test_health(self, executor: Executor) -> None:
        executor.check_health()
        executor.shutdown()
        with pytest.raises(ExecutorFailed):
            executor.check_health()

    def test_shutdown_is_idempotent_and_final(self, executor: Executor) -> None:
        threads = [threading.Thread(target=executor.shutdown) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        executor.shutdown()
        with pytest.raises(ExecutorFailed):
            executor.collective_rpc("echo", (1,))

    def test_shutdown_during_a_step_ends_the_step(self, executor: Executor) -> None:
        step = executor.execute_model(plan(1, sleep=0.5), non_block=True)
        waiting = executor.collective_rpc("echo", (1,), non_block=True)
        executor.shutdown()
        for future in (step, waiting):
            with pytest.raises(ExecutorFailed):
                future.result(PATIENCE)


def _wait_for(condition: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
