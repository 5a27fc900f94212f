"""The front end and the loop, over fakes: text, stops, aborts, failures."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from pegboard.engine.errors import EngineDeadError
from pegboard.engine.llm_engine import LLMEngine
from pegboard.engine.outputs import OutputKind, RequestOutput
from pegboard.plugins import RequestFields, hookimpl
from pegboard.wire import SamplingParams


def drain(engine: LLMEngine, steps: int = 200) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        steps -= 1
        assert steps, "the engine does not come to an end"
    return outputs


def say(engine: LLMEngine, rid: str = "a", kind: OutputKind = OutputKind.FINAL, **params: Any) -> list[RequestOutput]:
    engine.add_request(rid, "hi", SamplingParams(**{"max_tokens": 40, **params}), kind=kind)
    return drain(engine)


def test_an_answer_ends_with_the_end_of_sequence_token(make_engine: Any) -> None:
    [output] = say(make_engine({"a": "Paris."}))
    [answer] = output.outputs
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("Paris.", "stop", None)
    assert len(answer.token_ids) == 7
    assert answer.token_ids[-1] == 0
    assert output.finished
    assert (output.prompt, output.prompt_token_ids) == ("hi", [8, 9])
    assert output.metrics is not None
    assert output.metrics.arrival_time <= output.metrics.first_token_time <= output.metrics.finished_time  # type: ignore[operator]


def test_cumulative_and_delta_outputs_say_the_same(make_engine: Any) -> None:
    engine = make_engine({"a": "one two", "b": "one two"})
    cumulative = say(engine, "a", OutputKind.CUMULATIVE)
    deltas = say(engine, "b", OutputKind.DELTA)
    assert cumulative[-1].outputs[0].text == "one two" == "".join(o.outputs[0].text for o in deltas)
    assert [len(o.outputs[0].token_ids) for o in cumulative] == list(range(1, 9))
    assert cumulative[-1].outputs[0].token_ids == [t for o in deltas for t in o.outputs[0].token_ids]
    assert [o.finished for o in deltas] == [False] * 7 + [True]


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab<x>")])
def test_a_stop_string_ends_the_request_in_the_core_too(make_engine: Any, include: bool, text: str) -> None:
    engine = make_engine({"a": "ab<x>never said"})
    deltas = say(engine, kind=OutputKind.DELTA, stop=("<x>",), include_stop_str_in_output=include)
    assert "".join(o.outputs[0].text for o in deltas) == text
    last = deltas[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", "<x>")
    assert len(deltas) == 5, "generation went on after the match"
    assert engine.stats().num_running == 0


def test_tokens_after_a_stop_string_in_one_step_are_dropped(make_engine: Any) -> None:
    engine = make_engine({"a": [[1, 2, 3, 4]]})
    [output] = say(engine, stop=("b",))
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("a", [1, 2])


def test_text_held_for_a_stop_string_appears_at_the_end(make_engine: Any) -> None:
    [output] = say(make_engine({"a": "ab<"}), stop=("<x>",))
    assert output.outputs[0].text == "ab<"


def test_min_tokens_holds_for_stop_strings(make_engine: Any) -> None:
    [output] = say(make_engine({"a": "x.x.x.x."}), stop=(".",), min_tokens=5)
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("x.x.x", 6)


def test_own_stop_token_is_named_and_hidden(make_engine: Any) -> None:
    [output] = say(make_engine({"a": "abc"}), stop_token_ids=(2,))
    assert (output.outputs[0].text, output.outputs[0].stop_reason, output.outputs[0].token_ids) == ("a", 2, [1, 2])


def test_ignore_eos_runs_to_the_limit(make_engine: Any) -> None:
    [output] = say(make_engine({"a": "ab"}), ignore_eos=True, max_tokens=5)
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("length", 5)


def test_logprobs_have_ranks_and_texts(make_engine: Any) -> None:
    [output] = say(make_engine({"a": "z"}), logprobs=2, max_tokens=2)
    first = output.outputs[0].logprobs[0]  # type: ignore[index]
    assert list(first) == [26, 5, 6]
    assert [(p.rank, p.decoded_token) for p in first.values()] == [(2, "z"), (1, "e"), (3, "f")]
    assert output.outputs[0].cumulative_logprob == pytest.approx(-3.0)
    assert say(make_engine({"a": "z"}))[0].outputs[0].logprobs is None


def test_a_row_that_fails_ends_alone(make_engine: Any) -> None:
    engine = make_engine({"a": [1, "logits are not a number"], "b": "bcd"})
    engine.add_request("a", "hi", SamplingParams(max_tokens=9))
    by_id = {o.request_id: o.outputs[0] for o in say(engine, "b") if o.finished}
    assert (by_id["a"].finish_reason, by_id["a"].stop_reason) == ("error", "logits are not a number")
    assert (by_id["b"].finish_reason, by_id["b"].text) == ("stop", "bcd")


def test_abort_gives_one_last_output_and_leaves_others_alone(make_engine: Any) -> None:
    engine = make_engine({"a": "abcdef", "b": "bcd"})
    for rid in "ab":
        engine.add_request(rid, "hi", SamplingParams(max_tokens=20), kind=OutputKind.FINAL)
    engine.step()
    engine.abort_request(["a", "unknown", "a"])
    assert engine.stats().num_running == 1
    outputs = drain(engine)
    assert [(o.request_id, o.outputs[0].finish_reason, o.outputs[0].text) for o in outputs] == [
        ("a", "abort", "a"),
        ("b", "stop", "bcd"),
    ]
    engine.abort_request("a")
    assert not engine.has_unfinished_requests()


def test_an_id_is_refused_while_in_use_and_free_after_abort(make_engine: Any) -> None:
    engine = make_engine({"a": "abc"})
    engine.add_request("a", "hi", SamplingParams(max_tokens=20), kind=OutputKind.FINAL)
    with pytest.raises(ValueError, match="'a' is still in use"):
        engine.add_request("a", "hi")
    engine.step()
    engine.abort_request("a")
    engine.add_request("a", "hi", SamplingParams(max_tokens=20), kind=OutputKind.FINAL)
    assert [o.outputs[0].finish_reason for o in drain(engine)] == ["abort", "stop"]


def test_a_request_that_the_scheduler_refuses_leaves_nothing_behind(make_engine: Any) -> None:
    engine = make_engine({"b": "b"})
    scheduler = engine.client.core.scheduler
    scheduler.kv_config = scheduler.kv_config.__class__(num_blocks=2, groups=scheduler.kv_config.groups)
    with pytest.raises(ValueError, match="never fit"):
        engine.add_request("a", [1] * 10, SamplingParams(max_tokens=1))
    assert engine.num_unfinished_requests == 0
    assert say(engine, "b")[0].outputs[0].text == "b"


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_several_steps_in_flight_change_nothing(make_engine: Any, batches: int) -> None:
    engine = make_engine({"a": "abc", "b": "bcdef"}, batches=batches)
    engine.add_request("a", "hi", SamplingParams(max_tokens=20), kind=OutputKind.FINAL)
    assert {o.request_id: o.outputs[0].text for o in say(engine, "b")} == {"a": "abc", "b": "bcdef"}


def test_finished_slots_reach_the_workers_without_another_request(make_engine: Any, executor_of: Any) -> None:
    engine = make_engine({"a": "abc"})
    say(engine)
    assert executor_of(engine).rows == {}
    assert engine.step() == []


def test_grammar_rows_take_the_second_half_of_the_step(make_engine: Any, executor_of: Any) -> None:
    class Fields(BaseModel):
        pass

    class Plugin:
        @hookimpl
        def request_fields(self) -> list[RequestFields]:
            return [RequestFields("halves", Fields)]

    engine = make_engine({"a": "ab"}, plugins={"halves": Plugin()})
    [output] = say(engine, ext={"halves": {}})
    assert output.outputs[0].text == "ab"
    assert len(executor_of(engine).masked) == 3


def test_a_failing_step_ends_everything_with_the_root_cause(make_engine: Any, executor_of: Any) -> None:
    engine = make_engine({"a": "abc"})
    engine.add_request("a", "hi", SamplingParams(max_tokens=20))
    engine.step()
    executor = executor_of(engine)
    executor.fail_at = 0
    with pytest.raises(EngineDeadError, match="no room left on the device") as caught:
        engine.step()
    assert isinstance(caught.value.cause, MemoryError)
    assert executor.stopped == 1
    assert not engine.has_unfinished_requests(), "a loop over it would hang"
    for call in (engine.step, engine.stats, engine.check_health, lambda: engine.add_request("b", "hi")):
        with pytest.raises(EngineDeadError, match="no room left"):
            call()
    engine.shutdown()


def test_a_step_that_hangs_ends_the_engine_and_names_the_option(
    make_engine: Any, executor_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine({"a": "abc"}, config={"executor": {"step_timeout": 0.05}})
    engine.add_request("a", "hi", SamplingParams(max_tokens=20))
    monkeypatch.setattr(executor_of(engine), "execute_model", lambda plan, non_block: Future())
    monkeypatch.setattr(executor_of(engine), "waits_for", lambda: "rank 3")
    with pytest.raises(EngineDeadError, match=r"executor.step_timeout=0.05 s: no answer from rank 3"):
        engine.step()


def test_a_step_cut_by_an_interrupt_ends_the_engine(make_engine: Any, executor_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine({"a": "abc"})
    engine.add_request("a", "hi", SamplingParams(max_tokens=20))

    def cut(plan: Any, non_block: bool) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(executor_of(engine), "execute_model", cut)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        engine.step()


def test_a_failure_between_steps_is_told_at_the_next_call(make_engine: Any, executor_of: Any) -> None:
    engine = make_engine({"a": "abc"})
    engine.add_request("a", "hi", SamplingParams(max_tokens=20))
    for callback in executor_of(engine).callbacks:
        callback(RuntimeError("worker 1 was killed by signal 9"))
    with pytest.raises(EngineDeadError, match="signal 9"):
        engine.step()
    assert not engine.has_unfinished_requests()


def test_an_rpc_that_raises_does_not_end_the_engine(make_engine: Any) -> None:
    engine = make_engine({"a": "abc"})
    with pytest.raises(AttributeError):
        engine.collective_rpc("no_such_method")
    assert say(engine)[0].outputs[0].text == "abc"


def test_shutdown_is_idempotent_and_says_why_later_calls_fail(make_engine: Any, executor_of: Any) -> None:
    engine = make_engine()
    executor = executor_of(engine)
    with engine:
        pass
    engine.shutdown()
    assert executor.stopped == 1
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.add_request("a", "hi")


def test_an_engine_that_goes_away_stops_its_workers(make_engine: Any, executor_of: Any) -> None:
    engine = make_engine()
    executor, core = executor_of(engine), weakref.ref(engine.client.core)
    make_engine.__closure__[0].cell_contents.clear()
    del engine
    gc.collect()
    assert core() is None
    assert executor.stopped == 1


def test_start_and_stop_hooks_run_once_each_in_order(make_engine: Any) -> None:
    told: list[str] = []

    class Plugin:
        @hookimpl
        def engine_starting(self, info: Any) -> None:
            told.append(f"starting {info.model}")

        @hookimpl
        def engine_ready(self, info: Any) -> None:
            told.append("ready")

        @hookimpl
        def engine_stopping(self, info: Any) -> None:
            told.append("stopping")

    engine = make_engine(plugins={"observer": Plugin()})
    engine.shutdown()
    engine.shutdown()
    assert told == ["starting fake", "ready", "stopping"]


def test_a_plugin_may_refuse_a_request(make_engine: Any) -> None:
    class Plugin:
        @hookimpl
        def validate_request(self, request: Any) -> None:
            if len(request.prompt_token_ids) > 3:
                raise ValueError("too long for my taste")

    engine = make_engine({"a": "b"}, plugins={"taste": Plugin()})
    with pytest.raises(ValueError, match="my taste"):
        engine.add_request("x", "hello")
    assert say(engine)[0].outputs[0].text == "b"


def test_padded_vocabulary_is_told_to_the_workers(make_engine: Any, executor_of: Any, caplog: Any) -> None:
    assert executor_of(make_engine(vocab_size=100)).vocab_limit == 62
    assert not caplog.records
    engine = make_engine(vocab_size=50)
    assert "from 50 on are refused" in caplog.text
    with pytest.raises(ValueError, match=r"=55 is not in the model's vocabulary"):
        engine.add_request("a", [55])


def test_stat_loggers_see_every_step_and_are_switched_off_when_they_fail(make_engine: Any, caplog: Any) -> None:
    seen: list[Any] = []

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    good = SimpleNamespace(record=lambda scheduler, iteration: seen.append(iteration), log=lambda: None)
    bad = SimpleNamespace(record=fail, log=lambda: None)
    engine = make_engine({"a": "ab" * 10}, stat_loggers={"good": good, "bad": bad})
    say(engine)
    assert sum(i.num_generation_tokens for i in seen) == 21
    assert sum(i.num_prompt_tokens for i in seen) == 2
    assert [len(i.time_to_first_token) for i in seen][:2] == [1, 0]
    assert sum(i.num_finished for i in seen) == 1
    assert sum("disk full" in r.getMessage() or "raised" in r.getMessage() for r in caplog.records) == 1
    assert "switched off" in caplog.text


class _Sink:
    def __init__(self) -> None:
        self.closed = 0

    def emit(self, event: Any) -> None: ...

    def close(self) -> None:
        self.closed += 1


def test_the_end_reaches_everybody_whatever_one_of_them_raises(make_engine: Any, executor_of: Any, caplog: Any) -> None:
    told: list[str] = []

    class Bad:
        @hookimpl
        def engine_stopping(self, info: Any) -> None:
            raise OSError("disk full")

    class Good:
        @hookimpl
        def engine_stopping(self, info: Any) -> None:
            told.append("stopping")

    sinks = {"bad": SimpleNamespace(close=lambda: 1 / 0), "good": _Sink()}
    engine = make_engine(plugins={"a": Bad(), "b": Good()}, event_sinks=sinks)
    executor = executor_of(engine)
    engine.shutdown()
    engine.shutdown()
    assert (told, sinks["good"].closed, executor.stopped) == (["stopping"], 1, 1)
    assert "engine_stopping of plugin 'a'" in caplog.text
    assert "closing event sink 'bad'" in caplog.text


def test_a_failing_stop_does_not_hide_why_the_engine_did_not_start(make_engine: Any) -> None:
    class Plugin:
        @hookimpl
        def engine_starting(self, info: Any) -> None:
            raise RuntimeError("the cause")

        @hookimpl
        def engine_stopping(self, info: Any) -> None:
            raise OSError("a symptom")

    with pytest.raises(RuntimeError, match="the cause"):
        make_engine(plugins={"a": Plugin()})


def test_the_executors_own_report_is_the_cause_and_not_its_symptom(make_engine: Any, executor_of: Any) -> None:
    engine = make_engine({"a": "ab"})
    executor = executor_of(engine)
    engine.add_request("a", "hi")
    root = ConnectionError("the worker's process has gone")

    def symptom(*_: Any) -> Any:
        executor.callbacks[0](root)
        raise MemoryError("symptom")

    executor._execute_model = symptom
    with pytest.raises(EngineDeadError, match="the worker's process has gone") as caught:
        engine.step()
    assert caught.value.__cause__ is root


def test_a_scheduler_that_fails_to_abort_ends_the_engine(make_engine: Any, monkeypatch: Any) -> None:
    engine = make_engine({"a": "ab", "b": "cd"})
    engine.add_request("a", "hi")
    engine.add_request("b", "hi")
    engine.abort_request("b")
    monkeypatch.setattr(engine.client.core.scheduler, "finish_requests", lambda *_: 1 / 0)
    with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
        engine.abort_request("a")
    engine.withdraw(["a"])
    assert not engine.has_unfinished_requests()


def test_nothing_is_left_to_report_after_shutdown(make_engine: Any) -> None:
    engine = make_engine({"a": "ab"})
    engine.add_request("a", "hi")
    engine.abort_request("a")
    assert engine.has_unfinished_requests()
    engine.shutdown()
    assert not engine.has_unfinished_requests()
