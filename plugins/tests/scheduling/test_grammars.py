"""Grammars in the default scheduler: whose rows are masked, what is accepted, how a request ends with its grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pegboard.testing.driver import SchedulerDriver, expected_output, make_group, make_request
from pegboard.testing.fake_grammars import FakeGrammar, FakeGrammars
from pegboard.testing.fakes import hash_model
from pegboard.wire import FinishReason

MODEL = hash_model(1000)
DriverOf = Callable[..., SchedulerDriver]
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


def test_rows_that_sample_are_listed(driver_of: DriverOf) -> None:
    driver = driver_of(max_num_batched_tokens=12)
    driver.add(
        make_request("short", range(4), 9, grammar=FakeGrammar(3, 5)),
        make_request("plain", range(50, 53), 9),
        make_request("long", range(20, 30), 9, grammar=FakeGrammar(3, 5)),
    )
    plan = driver.plan()
    assert (plan.slots, plan.num_to_sample, plan.grammar_slots) == ([0, 1, 2], [1, 1, 0], [0])
    driver.book()
    assert driver.plan().grammar_slots == [0, 2]
    driver.book()
    driver.abort(["short", "long"])
    assert driver.plan().grammar_slots == []
    assert driver.scheduler.grammar_output(driver.plans[-1]) is None


def test_forked_rows_are_listed(driver_of: DriverOf) -> None:
    driver = driver_of()
    group = make_group("g", range(6), 3, grammar=FakeGrammar(4, 5))
    driver.add(*group)
    assert driver.plan().grammar_slots == [0, 1, 2]
    driver.run()
    driver.assert_right(*group)


@pytest.mark.parametrize("depth", [2, 3])
def test_only_requests_with_a_grammar_wait_for_their_last_token(driver_of: DriverOf, depth: int) -> None:
    driver = driver_of(depth=depth)
    driver.add(make_request("bound", [1], 20, grammar=FakeGrammar(3, 9)), make_request("free", [2], 20))
    assert driver.plan().slots == [0, 1]
    assert driver.plan().slots == [1]
    driver.book()
    assert driver.plan().slots == [0, 1]


class Recorder(FakeGrammars):
    def __init__(self, refused: Sequence[int] = ()) -> None:
        super().__init__(1000)
        self.accepted: list[int] = []
        self.refused = refused

    def accept(self, request_id: str, token_ids: Sequence[int]) -> str | None:
        self.accepted += token_ids
        return "it got too costly" if set(token_ids) & set(self.refused) else super().accept(request_id, token_ids)


def with_grammars(driver_of: DriverOf, grammars: FakeGrammars, **settings: Any) -> SchedulerDriver:
    driver = driver_of(**settings)
    driver.grammars = driver.scheduler.state.grammars = grammars  # type: ignore[attr-defined]
    return driver


@DEPTHS
def test_the_stop_token_is_not_part_of_the_language(driver_of: DriverOf, depth: int) -> None:
    grammar = FakeGrammar(3, 9)
    tokens, _ = expected_output(make_request("r", [1], 20, grammar=grammar), MODEL)
    stop = next(token for place, token in enumerate(tokens) if place >= 3 and token not in tokens[:place])
    recorder = Recorder()
    driver = with_grammars(driver_of, recorder, depth=depth)
    request = make_request("r", [1], 20, grammar=grammar, stop_token_ids=[stop])
    driver.add(request)
    driver.run()
    driver.assert_right(request)
    assert driver.tokens["r"][-1] == driver.last["r"].stop_reason == stop
    assert recorder.accepted == driver.tokens["r"][:-1]


def test_a_stop_token_before_the_minimum_is_a_token_like_any(driver_of: DriverOf) -> None:
    grammar = FakeGrammar(3, 9)
    tokens, _ = expected_output(make_request("r", [1], 20, grammar=grammar), MODEL)
    recorder = Recorder()
    driver = with_grammars(driver_of, recorder)
    driver.add(make_request("r", [1], 20, grammar=grammar, stop_token_ids=tokens[:1], min_tokens=2))
    driver.step()
    assert recorder.accepted == driver.tokens["r"] == tokens[:1]


@DEPTHS
def test_a_grammar_that_cannot_go_on_ends_its_request_alone(driver_of: DriverOf, depth: int) -> None:
    request, other = make_request("r", [1], 20, grammar=FakeGrammar(3, 9)), make_request("other", [2], 20)
    tokens, _ = expected_output(request, MODEL)
    recorder = Recorder(refused=tokens[2:3])
    driver = with_grammars(driver_of, recorder, depth=depth)
    driver.add(request, other)
    driver.run()
    assert driver.tokens["r"] == tokens[:2]
    assert driver.finished["r"] == FinishReason.ERROR
    assert driver.last["r"].stop_reason == "it got too costly"
    assert not recorder.outputs
    driver.assert_right(other)


def test_a_grammar_that_ends_with_the_last_token_ends_by_stop(driver_of: DriverOf) -> None:
    driver = driver_of()
    driver.add(make_request("r", [1], 5, grammar=FakeGrammar(3, 5)))
    driver.run()
    assert (driver.finished["r"], len(driver.tokens["r"])) == (FinishReason.STOP, 5)


@DEPTHS
def test_requests_are_forgotten_however_they_end(driver_of: DriverOf, depth: int) -> None:
    driver = driver_of(12, 4, depth=depth, max_num_seqs=4)
    grammar = FakeGrammar(3, 30)
    requests = [make_request(f"r{i}", [i + 1], 40, grammar=grammar) for i in range(6)]
    driver.add(*requests)
    for _ in range(20):
        driver.step()
    assert driver.scheduler.stats().num_preemptions > 0
    assert driver.grammars is not None
    for request in requests:
        driver.abort([request.request_id])
        assert request.request_id not in driver.grammars.outputs
    failing = make_request("failing", [1], 40, grammar=grammar)
    driver.add(failing)
    driver.runner.fail_rows["failing"] = "logits are not a number"
    driver.run()
    assert not driver.grammars.outputs


def test_drafts_are_not_taken(driver_of: DriverOf) -> None:
    driver = driver_of(propose=lambda token_ids: [1, 2])
    request, other = make_request("r", [1], 20, grammar=FakeGrammar(3, 9)), make_request("other", [2], 20)
    driver.add(request, other)
    driver.run()
    driver.assert_right(request, other)
    assert {slot for plan in driver.plans for slot in plan.spec_slots} == {1}


def test_without_grammars_a_request_that_has_one_is_refused(driver_of: DriverOf) -> None:
    driver = driver_of()
    driver.scheduler.state.grammars = None  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="'r' has a grammar"):
        driver.add(make_request("r", [1], grammar=FakeGrammar(3, 9)))
