"""Several answers to one prompt, over fakes: what is reported when, ends that differ, aborts and failures."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.engine.errors import EngineDeadError
from pegboard.engine.llm_engine import LLMEngine
from pegboard.engine.outputs import OutputKind, RequestOutput
from pegboard.plugins import hookimpl
from pegboard.plugins.errors import PluginError
from pegboard.wire import SamplingParams

SAID = {"x#0": "one", "x#1": "seven", "x#2": "a"}
"""4, 6 and 2 tokens with the end-of-sequence token."""


def drain(engine: LLMEngine, steps: int = 200) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        steps -= 1
        assert steps, "the engine does not come to an end"
    return outputs


def ask(engine: LLMEngine, kind: OutputKind, n: int = 3, **params: Any) -> list[RequestOutput]:
    engine.add_request("x", "hi", SamplingParams(**{"n": n, "max_tokens": 40, "output_kind": kind, **params}))
    return drain(engine)


def texts(output: RequestOutput) -> list[str]:
    return [answer.text for answer in output.outputs]


def test_all_of_them_at_the_end(make_engine: Any) -> None:
    [output] = ask(make_engine(SAID), OutputKind.FINAL)
    assert (output.request_id, output.finished, texts(output)) == ("x", True, ["one", "seven", "a"])
    assert [a.index for a in output.outputs] == [0, 1, 2]
    assert [a.finish_reason for a in output.outputs] == ["stop"] * 3
    assert output.text == "one"


def test_the_text_of_an_output_is_that_of_the_first_answer(make_engine: Any) -> None:
    """Also in a stream, where an output may have news of others alone."""
    outputs = ask(make_engine(SAID), OutputKind.DELTA)
    assert [o.text for o in outputs] == ["o", "n", "e", "", "", ""]
    assert [o.outputs[0].index for o in outputs] == [0, 0, 0, 0, 1, 1]


def test_all_of_them_so_far_whenever_one_has_news(make_engine: Any) -> None:
    outputs = ask(make_engine(SAID), OutputKind.CUMULATIVE)
    assert [texts(o) for o in outputs] == [
        ["o", "s", "a"],
        ["on", "se", "a"],
        ["one", "sev", "a"],
        ["one", "seve", "a"],
        ["one", "seven", "a"],
        ["one", "seven", "a"],
    ]
    assert [[a.finished for a in o.outputs] for o in outputs[1:5:3]] == [[False, False, True], [True, False, True]]
    assert [o.finished for o in outputs] == [False] * 5 + [True]


def test_only_those_with_news(make_engine: Any) -> None:
    outputs = ask(make_engine(SAID), OutputKind.DELTA)
    assert [[a.index for a in o.outputs] for o in outputs] == [[0, 1, 2], [0, 1, 2], [0, 1], [0, 1], [1], [1]]
    assert [texts(o) for o in outputs] == [["o", "s", "a"], ["n", "e", ""], ["e", "v"], ["", "e"], ["n"], [""]]
    ends = [a.index for o in outputs for a in o.outputs if a.finish_reason]
    assert ends == [2, 0, 1], "each ends once"
    assert [o.finished for o in outputs] == [False] * 5 + [True]


@pytest.mark.parametrize("kind", list(OutputKind))
def test_the_kind_of_the_call_wins_over_that_of_the_parameters(make_engine: Any, kind: OutputKind) -> None:
    engine = make_engine(SAID)
    engine.add_request("x", "hi", SamplingParams(n=3, max_tokens=40, output_kind=OutputKind.CUMULATIVE), kind=kind)
    assert len(drain(engine)) == (1 if kind is OutputKind.FINAL else 6)
    engine.add_request("x", "hi", SamplingParams(n=3, max_tokens=40), kind=kind.value)  # type: ignore[arg-type]
    assert sum(len(o.outputs) for o in drain(engine)) == {"final": 3, "delta": 12, "cumulative": 18}[kind.value]


def test_a_stop_string_ends_one_of_them(make_engine: Any) -> None:
    engine = make_engine({"x#0": "abcdef", "x#1": "xyz"})
    [output] = ask(engine, OutputKind.FINAL, 2, stop=("cd",))
    assert [(a.text, a.finish_reason, a.stop_reason) for a in output.outputs] == [("ab", "stop", "cd"), ("xyz", "stop", None)]
    assert len(output.outputs[0].token_ids) == 4
    assert engine.stats().num_running == 0


def test_an_error_of_one_harms_no_other(make_engine: Any) -> None:
    engine = make_engine({"x#0": [1, "not a number"], "x#1": "xyz"})
    outputs = ask(engine, OutputKind.DELTA, 2)
    ends = {a.index: (a.finish_reason, a.stop_reason) for o in outputs for a in o.outputs if a.finished}
    assert ends == {0: ("error", "not a number"), 1: ("stop", None)}
    assert "".join(a.text for o in outputs for a in o.outputs if a.index == 1) == "xyz"
    assert [o.finished for o in outputs].count(True) == 1


@pytest.mark.parametrize("kind", list(OutputKind))
def test_an_abort_ends_all_that_go_on(make_engine: Any, kind: OutputKind) -> None:
    engine = make_engine({**SAID, "y": "abc"})
    engine.add_request("x", "hi", SamplingParams(n=3, max_tokens=40), kind=kind)
    engine.add_request("y", "hi", SamplingParams(max_tokens=40), kind=OutputKind.FINAL)
    for _ in range(2):
        engine.step()
    engine.abort_request("x")
    assert engine.stats().num_running == 1
    last, other = drain(engine)
    assert (last.request_id, last.finished) == ("x", True)
    reasons = {a.index: a.finish_reason for a in last.outputs}
    assert reasons == ({0: "abort", 1: "abort"} if kind is OutputKind.DELTA else {0: "abort", 1: "abort", 2: "stop"})
    if kind is not OutputKind.DELTA:
        assert texts(last) == ["on", "se", "a"]
    assert (other.request_id, other.text) == ("y", "abc")


def test_the_core_knows_each_by_an_id_of_its_own(make_engine: Any) -> None:
    engine = make_engine(SAID)
    engine.add_request("x", "hi", SamplingParams(n=3, max_tokens=40))
    ids = engine.core_ids("x")
    requests = engine.client.core.scheduler.requests
    assert list(requests) == ids
    assert [requests[i].sampling.seed - requests[ids[0]].sampling.seed for i in ids] == [0, 1, 2]
    engine.step()
    engine.step()
    assert engine.core_ids("x") == ids[:2], "the third has ended"
    assert engine.num_unfinished_requests == 1
    assert engine.core_ids("unknown") == []


def test_counters_count_the_prompt_once(make_engine: Any) -> None:
    seen: list[Any] = []

    class Logger:
        def record(self, scheduler: Any, iteration: Any) -> None:
            seen.append(iteration)

        def log(self) -> None: ...

    [output] = ask(make_engine(SAID, stat_loggers={"a": Logger()}), OutputKind.FINAL)
    assert sum(i.num_prompt_tokens for i in seen) == 2
    assert sum(i.num_generation_tokens for i in seen) == 12
    assert sum(i.num_finished for i in seen) == 1
    assert sum(len(i.time_to_first_token) for i in seen) == 1
    assert sum(len(i.inter_token_latency) for i in seen) == 9
    metrics = output.metrics
    assert metrics is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.last_token_time <= metrics.finished_time  # type: ignore[operator]


def test_a_dead_engine_drops_all(make_engine: Any, executor_of: Any) -> None:
    engine = make_engine(SAID)
    engine.add_request("x", "hi", SamplingParams(n=3, max_tokens=40))
    engine.step()
    executor_of(engine).fail_at = 0
    with pytest.raises(EngineDeadError):
        engine.step()
    assert not engine.has_unfinished_requests()
    assert engine.core_ids("x") == []


@pytest.mark.parametrize("error", [ValueError("full"), KeyError("full"), KeyboardInterrupt("full")])
def test_a_scheduler_that_refuses_one_takes_none(make_engine: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Nor where something else comes in between: no answer goes on that nobody listens to."""
    engine = make_engine({"x": "ab"})
    scheduler = engine.client.core.scheduler
    add, added = scheduler.add_request, []

    def add_two(request: Any) -> None:
        if len(added) == 2:
            raise error
        added.append(request.request_id)
        add(request)

    monkeypatch.setattr(scheduler, "add_request", add_two)
    with pytest.raises(type(error), match="full"):
        engine.add_request("x", "hi", SamplingParams(n=3))
    assert scheduler.requests == {}
    assert engine.num_unfinished_requests == 0
    monkeypatch.setattr(scheduler, "add_request", add)
    assert texts(ask(engine, OutputKind.FINAL)[0]) == ["ab"] * 3


def test_what_a_plugin_makes_of_a_request_is_reported_as_one(make_engine: Any) -> None:
    import msgspec

    replace = msgspec.structs.replace

    class Plugin:
        @hookimpl
        def expand_request(self, request: Any) -> Any:
            if request.sampling.n == 9:
                return [request]
            names = ("left", "right")
            return [replace(request, request_id=i, sampling=replace(request.sampling, n=1, seed=1)) for i in names]

    engine = make_engine({"left": "ab", "right": "xyz"}, plugins={"acme": Plugin()})
    [output] = ask(engine, OutputKind.FINAL)
    assert (output.request_id, texts(output)) == ("x", ["ab", "xyz"])
    with pytest.raises(PluginError, match="acme"):
        engine.add_request("y", "hi", SamplingParams(n=9))
    assert engine.num_unfinished_requests == 0
