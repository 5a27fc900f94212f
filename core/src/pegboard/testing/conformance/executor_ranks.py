"""What executors keep beyond ``ExecutorConformance`` when several ranks are in processes of their own: a further base class."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pegboard.contracts.executor import Executor, WorkerError
from pegboard.testing.conformance.executor import PATIENCE


class OnlyThere:
    """Loads in the process that made it only, which is to send it."""

    def __reduce__(self) -> Any:
        return _load_there, (os.getpid(),)


def _load_there(pid: int) -> str:
    if os.getpid() != pid:
        raise ValueError("odd-17: made by another process")
    return "loaded"


class RanksInProcesses:
    """For a subclass of ``ExecutorConformance`` whose executor has two ranks or more, each in a process of its own."""

    def test_what_cannot_be_pickled_fails_its_call_alone(self, executor: Executor) -> None:
        with pytest.raises(TypeError, match="pickle"):
            executor.collective_rpc("echo", (threading.Lock(),))
        with pytest.raises(WorkerError, match="pickle"):
            executor.collective_rpc(lambda worker: threading.Lock())
        assert executor.collective_rpc("echo", (1,), timeout=PATIENCE)[0]["value"] == 1

    def test_what_cannot_be_loaded_fails_its_call_alone(self, executor: Executor) -> None:
        before = executor.collective_rpc("echo", ("before",), non_block=True)
        with pytest.raises(WorkerError, match="odd-17") as there:
            executor.collective_rpc("echo", (OnlyThere(),), timeout=PATIENCE)
        with pytest.raises(WorkerError, match="odd-17") as here:
            executor.collective_rpc(lambda worker: OnlyThere(), timeout=PATIENCE)
        assert there.value.error_type == here.value.error_type == "ValueError"
        assert "cannot be loaded in this process" in here.value.__notes__[-1]
        assert before.result(PATIENCE)[1]["value"] == "before"
        assert executor.collective_rpc("echo", ("after",), timeout=PATIENCE)[0]["value"] == "after"

    def test_replies_are_the_caller_s_own(self, executor: Executor) -> None:
        """Not views of memory that later ones come in."""
        import numpy as np

        def array(worker: Any, value: int) -> Any:
            return np.full(100_000, value)

        first = executor.collective_rpc(array, (1,), timeout=PATIENCE)
        for value in range(2, 12):
            executor.collective_rpc(array, (value,), timeout=PATIENCE)
        first[0][0] = 17  # writable
        assert first[0].tolist() == [17] + [1] * 99_999
        assert first[1].tolist() == [1] * 100_000

    def test_time_outs_name_who_is_late(self, executor: Executor) -> None:
        ranks = executor.world.size

        def late(worker: Any) -> None:
            time.sleep(1.0 if worker.world.rank == ranks - 1 else 0.0)

        with pytest.raises(TimeoutError, match=rf"late: no answer from rank {ranks - 1} within 0\.5 s"):
            executor.collective_rpc(late, timeout=0.5)
        assert executor.collective_rpc("echo", (2,), timeout=PATIENCE)[-1]["value"] == 2, "not the late reply"
        future = executor.collective_rpc("sleep_then", (1.0, None), timeout=0.2, non_block=True)
        everyone = ", ".join(map(str, range(ranks)))
        with pytest.raises(TimeoutError, match=rf"sleep_then: no answer from ranks {everyone} within 0\.2 s"):
            future.result(PATIENCE)

    @pytest.mark.parametrize("rank", [0, 1])
    def test_an_error_is_told_while_the_others_wait(self, executor: Executor, rank: int, tmp_path: Path) -> None:
        """As those that wait in a collective."""
        told = str(tmp_path / "told")

        def one_raises(worker: Any) -> None:
            if worker.world.rank == rank:
                raise RuntimeError("boom-17")
            end = time.monotonic() + PATIENCE
            while not os.path.exists(told):
                assert time.monotonic() < end, "the error was never told"
                time.sleep(0.01)

        with pytest.raises(WorkerError, match="boom-17") as caught:
            executor.collective_rpc(one_raises, timeout=PATIENCE)
        assert caught.value.rank == rank
        open(told, "w").close()
        assert executor.collective_rpc("echo", (1,), timeout=PATIENCE)[0]["value"] == 1

    def test_a_process_forked_off_leaves_the_executor_alone(self, executor: Executor) -> None:
        """Whatever it does: the ranks are not its own."""
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                executor.shutdown()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert executor.collective_rpc("echo", (1,), timeout=PATIENCE)[1]["value"] == 1
