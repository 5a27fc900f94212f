"""Lockstep: engines that share their ranks decide alike, whatever their clocks and the speed of their machines."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from pegboard.engine.lockstep import Lockstep
from pegboard.wire import EngineCoreRequest, SamplingParams


class Others:
    """An executor of ``num_engines``: what the other ones say is given, ``own`` comes at its place."""

    def __init__(self, *values: Any, own: int = 1) -> None:
        self.num_engines = len(values) + 1
        self.asked: list[str] = []
        self._values, self._own = list(values), own

    def gather(self, what: str, value: Any) -> list[Any]:
        self.asked.append(what)
        return [*self._values[: self._own], value, *self._values[self._own :]]


def lockstep(*values: Any, own: int = 1) -> tuple[Lockstep, Others]:
    others = Others(*values, own=own)
    return Lockstep(others), others  # type: ignore[arg-type]


def alone() -> Lockstep:
    def gather(what: str, value: Any) -> list[Any]:
        raise AssertionError("a single engine asks nobody")

    return Lockstep(SimpleNamespace(num_engines=1, gather=gather))  # type: ignore[arg-type]


def request(**changes: Any) -> EngineCoreRequest:
    fields: dict[str, Any] = {
        "request_id": "a",
        "prompt_token_ids": [1, 2, 3],
        "sampling": SamplingParams(seed=1, logit_bias={5: 1}),
    }
    return EngineCoreRequest(**{**fields, "stop_token_ids": [2], "max_tokens": 9, "arrival_time": 5.0, **changes})


def test_a_single_engine_agrees_with_itself() -> None:
    one, asked = alone(), request()
    assert one.admit(asked) is asked
    one.abort(["a"])
    assert one.seed(None) is None
    assert one.seed(7) == 7
    assert one.outcomes({"a": None}) == {"a": None}
    before = time.time()
    assert before <= one.clock() <= time.time()


def test_a_seed_is_drawn_once_and_not_where_one_is_stated() -> None:
    one, others = lockstep(123)
    assert one.seed(7) == 7
    assert others.asked == []
    assert one.seed(None) == 123
    first, _ = lockstep(123, own=0)
    drawn = {first.seed(None) for _ in range(5)}
    assert len(drawn) == 5
    assert all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in drawn)


def test_requests_arrive_when_the_first_engine_says() -> None:
    one, _ = lockstep(3.0)
    assert one.admit(request()) == request(arrival_time=3.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"request_id": "b"},
        {"prompt_token_ids": [1, 2, 4]},
        {"prompt_token_ids": [1, 2]},
        {"max_tokens": 8},
        {"priority": 1},
        {"sampling": SamplingParams(seed=2)},
        {"cache_salt": "x"},
        {"group": "a"},
        {"ext": {"plugin": {"field": 1}}},
    ],
)
def test_all_of_a_request_is_compared_but_its_time(changes: dict[str, Any]) -> None:
    one, others = lockstep(0.0)
    for asked in (request(), request(arrival_time=7.0), request(**changes)):
        one.admit(asked)
    same, later, other = others.asked
    assert same == later != other
    assert "request 'a' with 3 prompt tokens" in same


def test_aborts_are_compared() -> None:
    one, others = lockstep(None)
    for ids in (["a", "b"], ["b"], None):
        one.abort(ids)
    assert others.asked == ["aborting the requests a, b", "aborting the requests b", "aborting all requests"]


def test_a_grammar_is_ready_when_all_have_it_and_failed_when_one_says_so() -> None:
    one, _ = lockstep({"a": None, "b": None, "e": "first"}, {"b": None, "c": None, "d": "slow", "e": "last"})
    own = {"a": None, "b": None, "c": None, "e": None, "f": None}
    assert one.outcomes(own) == {"b": None, "d": "slow", "e": "first"}


def test_the_time_is_asked_once_a_step() -> None:
    one, others = lockstep(50.0)
    one.begin_step()
    assert (one.clock(), one.clock()) == (50.0, 50.0)
    one.begin_step()
    one.begin_step()
    one.clock()
    assert others.asked == ["a look at the clock"] * 2
