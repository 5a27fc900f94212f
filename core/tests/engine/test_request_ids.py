"""One id twice: refused while in use, free right after the end, and nothing of the earlier request reaches the later one."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.engine.outputs import OutputKind
from pegboard.wire import EngineCoreOutput, FinishReason, SamplingParams


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "seed": 1, **fields})


@pytest.mark.parametrize("n", [1, 3])
def test_the_first_of_two_is_unharmed(make_engine: Any, n: int) -> None:
    engine = make_engine({"x": "hello"})
    engine.add_request("x", "hi", params(n=n), kind=OutputKind.FINAL)
    engine.step()
    for other in (1, 2):
        with pytest.raises(ValueError, match=r"request id 'x' is still in use; choose another one, or abort"):
            engine.add_request("x", "other", params(n=other))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [[a.text for a in o.outputs] for o in outputs] == [["hello"] * n]


def test_ids_like_those_of_its_answers_are_other_requests(make_engine: Any) -> None:
    engine = make_engine({"x": "ab"})
    engine.add_request("x", "hi", params(n=2), kind=OutputKind.FINAL)
    for other in ("x#0", "x#1", "x@0", *engine.core_ids("x")):
        engine.add_request(other, "hi", params(), kind=OutputKind.FINAL)
    engine.abort_request("x#0")
    ended = {}
    while engine.has_unfinished_requests():
        ended.update({o.request_id: [a.finish_reason for a in o.outputs] for o in engine.step()})
    assert ended.pop("x") == ["stop", "stop"]
    assert ended.pop("x#0") == ["abort"]
    assert set(map(tuple, ended.values())) == {("stop",)}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("batches", [1, 3])
def test_an_id_is_free_right_after_an_abort(make_engine: Any, n: int, batches: int) -> None:
    engine = make_engine({"x": "hello"}, batches=batches)
    for _ in range(200):
        engine.add_request("x", "hi", params(n=n), kind=OutputKind.DELTA)
        engine.step()
        engine.abort_request("x")
        engine.add_request("x", "hi", params(n=n), kind=OutputKind.FINAL)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        aborted, whole = outputs
        assert {a.finish_reason for a in aborted.outputs} == {"abort"}
        assert [(a.text, a.finish_reason) for a in whole.outputs] == [("hello", "stop")] * n
    assert engine.stats().num_running == 0
    assert not engine._outputs._places
    assert not engine._outputs._core_ids


def test_late_news_and_late_aborts_miss_the_new_request(make_engine: Any) -> None:
    """As they may come from a core in another process, which has not heard of the abort yet."""
    engine = make_engine({"x": "hello"})
    engine.add_request("x", "hi", params(), kind=OutputKind.FINAL)
    [old] = engine.core_ids("x")
    engine.step()
    engine.abort_request("x")
    engine.add_request("x", "hi", params(), kind=OutputKind.FINAL)
    assert [o.outputs[0].finish_reason for o in engine.step()] == ["abort"]
    late = [
        EngineCoreOutput(request_id=old, new_token_ids=[26]),
        EngineCoreOutput(request_id=old, finish_reason=FinishReason.ERROR, stop_reason="late"),
    ]
    processed = engine._outputs.process(late)
    assert (processed.outputs, processed.to_abort) == ([], [])
    engine.client.abort_requests([old])
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [o.text for o in outputs] == ["hello"]


def test_an_id_is_free_after_the_end_and_after_a_refusal(make_engine: Any) -> None:
    engine = make_engine({"x": "ab"})
    for _ in range(3):
        with pytest.raises(ValueError, match="empty"):
            engine.add_request("x", [], params())
        engine.add_request("x", "hi", params(), kind=OutputKind.FINAL)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert [o.text for o in outputs] == ["ab"]


def test_an_id_is_free_after_a_withdrawal(make_engine: Any) -> None:
    engine = make_engine({"x": "ab"})
    engine.add_request("x", "hi", params(n=2), kind=OutputKind.DELTA)
    engine.step()
    engine.withdraw(["x"])
    assert not engine._ended_outside
    engine.add_request("x", "hi", params(), kind=OutputKind.FINAL)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [o.text for o in outputs] == ["ab"]
