"""What ``Executor`` writes once for all implementations: picking one rank's reply out of a call's future."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from pegboard.contracts.executor import _map_future


def first(replies: Any) -> Any:
    return replies[0]


def test_the_reply_is_picked() -> None:
    call: Future[Any] = Future()
    picked = _map_future(call, first)
    call.set_result(["a", "b"])
    assert picked.result(0) == "a"


def test_a_call_that_is_cancelled_ends_whoever_waits_for_it() -> None:
    call: Future[Any] = Future()
    picked = _map_future(call, first)
    call.cancel()
    with pytest.raises(CancelledError):
        picked.result(0)


def test_too_few_replies_are_an_error_and_no_hang() -> None:
    call: Future[Any] = Future()
    picked = _map_future(call, first)
    call.set_result([])
    with pytest.raises(IndexError):
        picked.result(0)


def test_a_caller_that_has_gone_is_not_told() -> None:
    call: Future[Any] = Future()
    picked = _map_future(call, first)
    picked.cancel()
    call.set_result(["a"])
    assert picked.cancelled()
