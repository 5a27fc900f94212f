from __future__ import annotations

import math
import sys
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from pegboard.contracts.executor import ExecutorFailed, WorkerError
from pegboard_executor_mp.calls import Calls, Deadline, ranks_text
from pegboard_executor_mp.failure import Failure


def test_a_call_completes_with_all_replies_in_the_order_asked() -> None:
    calls = Calls()
    call = calls.begin("echo", (2, 0), None)
    calls.reply(call.id, 0, "zero")
    assert not call.future.done()
    assert call.waits_for() == "rank 2"
    calls.reply(call.id, 2, "two")
    assert call.future.result(0) == ["two", "zero"]


def test_a_call_with_one_answer_waits_for_all_ranks() -> None:
    calls = Calls()
    call = calls.begin("execute_model", range(2), 1)
    calls.reply(call.id, 1, "output")
    assert not call.future.done()
    calls.reply(call.id, 0, None)
    assert call.future.result(0) == "output"


def test_an_error_of_any_rank_ends_the_call_once() -> None:
    calls = Calls()
    call = calls.begin("execute_model", range(2), 1)
    calls.fail(call.id, WorkerError(0, "RuntimeError", "first"))
    calls.fail(call.id, WorkerError(1, "RuntimeError", "second"))
    calls.reply(call.id, 0, None)
    calls.reply(call.id, 1, "output")
    with pytest.raises(WorkerError, match="first"):
        call.future.result(0)


def test_late_and_unknown_replies_are_dropped() -> None:
    calls = Calls()
    late, other = calls.begin("a", (0,), None), calls.begin("b", (0,), None)
    calls.fail(late.id, TimeoutError("late"))
    calls.reply(late.id, 0, "for the first")
    calls.reply(12345, 0, "for nobody")
    assert not other.future.done()
    calls.reply(other.id, 0, "own")
    assert other.future.result(0) == ["own"]


def test_refusal_ends_what_is_open_and_stays() -> None:
    calls = Calls()
    call = calls.begin("echo", (0,), None)
    assert calls.refuse(ExecutorFailed("rank 1 is gone")) == [call]
    assert calls.refuse(ExecutorFailed("shut down")) == []
    for attempt in (lambda: call.future.result(0), lambda: calls.begin("echo", (0,), None)):
        with pytest.raises(ExecutorFailed, match="rank 1 is gone"):
            attempt()


def test_calls_complete_in_the_order_of_their_last_replies() -> None:
    calls = Calls()
    order: list[int] = []

    def note(future: Future[Any]) -> None:
        order.append(future.result()[0])

    opened = [calls.begin("step", range(2), None) for _ in range(300)]
    for number, call in enumerate(opened):
        call.future.add_done_callback(note)
        call.replies[0] = number  # what rank 0 replies below
    start = threading.Barrier(2)

    def rank(number: int) -> None:
        start.wait()
        for index, call in enumerate(opened):
            calls.reply(call.id, number, index)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == list(range(300))


def test_texts_of_ranks() -> None:
    assert (ranks_text([3]), ranks_text({2, 0})) == ("rank 3", "ranks 0, 2")


def test_deadlines() -> None:
    assert Deadline(None).left() is None
    assert Deadline(0).left() == 0
    assert 59 < (Deadline(60).left() or 0) <= 60
    for ages in (1e12, math.inf):
        assert threading.Lock().acquire(timeout=Deadline(ages).left() or 0), "as much as a lock can wait for"


def test_failure_is_told_once_whatever_callbacks_raise() -> None:
    failure, told, refusals = Failure(), [], []

    def broken(cause: BaseException) -> None:
        raise RuntimeError("a callback's own")

    failure.register(broken)
    failure.register(lambda cause: sys.exit(1))
    failure.register(told.append)
    failure.happen(ValueError("first"), refusals.append)
    failure.happen(ValueError("second"), refusals.append)
    failure.register(told.append)
    assert [str(cause) for cause in told] == ["first", "first"]
    assert [str(refusal) for refusal in refusals] == ["the executor has failed: first"]
    assert failure.wait(0)


def test_after_close_nothing_is_a_failure() -> None:
    failure, told = Failure(), []
    failure.register(told.append)
    failure.close()
    failure.happen(ValueError("ended on purpose"), told.append)
    assert (told, failure.cause, failure.wait(0)) == ([], None, True)
