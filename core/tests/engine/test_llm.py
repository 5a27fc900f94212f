"""LLM over fakes: order, batches that are refused, interrupts, failures."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from pegboard.engine.errors import EngineDeadError, RequestFailed
from pegboard.entrypoints.llm import LLM
from pegboard.wire import SamplingParams

TEN = SamplingParams(max_tokens=10)


@pytest.fixture
def make_llm(make_engine: Any) -> Callable[..., LLM]:
    """An LLM around a fake engine; its requests are called "0", "1" …"""

    def make(*said: Any, **facts: Any) -> LLM:
        llm = LLM.__new__(LLM)
        llm.engine = make_engine({str(i): line for i, line in enumerate(said)}, **facts)
        llm._ids = itertools.count()
        return llm

    return make


def test_answers_come_in_the_order_of_the_prompts(make_llm: Any) -> None:
    outputs = make_llm("a long one", "ab", "abcd").generate(["x", [1, 2], {"prompt": "y"}], TEN)
    assert [o.outputs[0].text for o in outputs] == ["a long one", "ab", "abcd"]
    assert [o.prompt for o in outputs] == ["x", None, "y"]
    assert all(o.finished for o in outputs)


def test_one_prompt_and_none(make_llm: Any) -> None:
    llm = make_llm("ab", "cd")
    assert llm.generate("x", TEN)[0].text == "ab"
    assert llm.generate([3, 4], TEN)[0].prompt_token_ids == [3, 4]
    assert llm.generate([]) == []


def test_params_for_each_prompt(make_llm: Any) -> None:
    llm = make_llm("abcdef", "abcdef")
    outputs = llm.generate(["x", "y"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)])
    assert [o.text for o in outputs] == ["a", "abc"]
    with pytest.raises(ValueError, match="1 sampling_params for 2 prompts"):
        llm.generate(["x", "y"], [TEN])


def test_several_answers_to_each_prompt(make_llm: Any) -> None:
    llm = make_llm("ab", "cd")
    llm.engine.client.core.executor.script["1#1"] = [26]
    outputs = llm.generate(["x", "y"], SamplingParams(n=2, max_tokens=10, output_kind="delta", echo=True))
    assert [[a.text for a in o.outputs] for o in outputs] == [["xab", "xab"], ["ycd", "yz"]]
    assert all(o.finished for o in outputs)


def test_parameters_of_each_prompt_are_its_own(make_llm: Any) -> None:
    params = [SamplingParams(n=n, seed=n, max_tokens=n) for n in (1, 2, 3)]
    outputs = make_llm("abc", "abc", "abc").generate(["x", "y", "z"], params)
    assert [[a.text for a in o.outputs] for o in outputs] == [["a"], ["ab"] * 2, ["abc"] * 3]


def test_priorities(make_llm: Any) -> None:
    llm = make_llm("ab", "ab", "ab", "ab", "ab", "ab")
    seen: list[int] = []
    submit = llm.engine.submit
    llm.engine.submit = lambda item, kind: (seen.append(item.request.priority), submit(item, kind))
    llm.generate(["x", "y"], TEN, priority=[2, -1])
    llm.generate(["x", "y"], SamplingParams(max_tokens=10, priority=7), priority=4)
    llm.generate("x", SamplingParams(max_tokens=10, priority=7))
    llm.chat([{"role": "user", "content": "hi"}], TEN, priority=5)
    assert seen == [2, -1, 4, 4, 7, 5]
    with pytest.raises(ValueError, match="1 priority for 2 prompts"):
        llm.generate(["x", "y"], TEN, priority=[1])
    with pytest.raises(ValueError, match="priority='high' must be one int for all prompts, or a list"):
        llm.generate(["x", "y"], TEN, priority="high")
    with pytest.raises(RequestFailed, match=r"prompts\[1\]: priority=1.5 must be an integer"):
        llm.generate(["x", "y"], TEN, priority=[1, 1.5])


def test_defaults_come_from_the_generation_config(make_llm: Any) -> None:
    llm = make_llm("abcdef", generation_config={"max_new_tokens": 2, "temperature": 0.5})
    assert llm.get_default_sampling_params() == SamplingParams(max_tokens=2, temperature=0.5)
    assert llm.generate("x")[0].text == "ab"


def test_defaults_never_exceed_the_context(make_llm: Any) -> None:
    """Nobody chose the number of tokens that a model recommends."""
    llm = make_llm("a" * 200, "b" * 200, "c" * 200, generation_config={"max_new_tokens": 5000})
    assert len(llm.generate([1] * 100)[0].outputs[0].token_ids) == 28
    llm.engine.add_request("1", [1] * 100)
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    assert len(outputs[-1].outputs[0].token_ids) == 28
    with pytest.raises(ValueError, match=r"max_tokens=5000 .* is over the limit"):
        llm.generate([1] * 100, llm.get_default_sampling_params())
    with pytest.raises(ValueError, match="leaves no room for output"):
        llm.generate([1] * 128)


def test_a_bad_prompt_is_named_and_nothing_runs(make_llm: Any) -> None:
    llm = make_llm("ab", "ab", "ab")
    with pytest.raises(RequestFailed, match=r"prompts\[1\]: prompt is empty") as caught:
        llm.generate(["a", "", "b"], TEN)
    assert caught.value.index == 1
    assert llm.stats().step == 0
    assert not llm.engine.has_unfinished_requests()


def test_a_prompt_that_fails_while_running_does_not_stop_the_others(make_llm: Any) -> None:
    first, second = make_llm([1, "not a number"], "abc").generate(["x", "y"], TEN)
    assert (first.outputs[0].finish_reason, first.outputs[0].stop_reason) == ("error", "not a number")
    assert second.text == "abc"


def test_a_refusal_by_the_scheduler_takes_the_batch_back(make_llm: Any) -> None:
    llm = make_llm("ab", "ab")
    core = llm.engine.client.core
    core.scheduler.kv_config = core.scheduler.kv_config.__class__(num_blocks=2, groups=core.scheduler.kv_config.groups)
    with pytest.raises(RequestFailed, match=r"prompts\[1\]: .*never fit"):
        llm.generate([[1], [1] * 9], TEN)
    assert llm.stats().num_running == 0
    assert not llm.engine._outputs


def test_ctrl_c_aborts_the_batch_and_leaves_the_engine_usable(make_llm: Any) -> None:
    llm = make_llm("abcdefghi", "abcdefghi", "xyz")
    step, steps = llm.engine.step, []

    def interrupted_step() -> Any:
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    llm.engine.step = interrupted_step
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], TEN)
    assert len(steps) == 3, "the step in which it came is finished, no further one begun"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.stats().num_running == 0
    assert [o.text for o in llm.generate("c", TEN)] == ["xyz"]


def test_ctrl_c_in_the_last_step_counts(make_llm: Any) -> None:
    """A loop of short calls could not be stopped otherwise."""
    llm = make_llm("ab", "xyz")
    step = llm.engine.step

    def interrupted_step() -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return step()

    llm.engine.step = interrupted_step
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", SamplingParams(max_tokens=1))
    llm.engine.step = step
    assert [o.text for o in llm.generate("c", TEN)] == ["xyz"]


def test_ctrl_c_while_a_batch_is_handed_over(make_llm: Any) -> None:
    llm = make_llm("abc", "abc", "abc", "xyz")
    core = llm.engine.client.core
    add, added = core.scheduler.add_request, []

    def interrupted_add(request: Any) -> None:
        added.append(request.request_id)
        if len(added) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        add(request)

    core.scheduler.add_request = interrupted_add
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], SamplingParams(n=3, max_tokens=10))
    assert len(added) == 6, "a request is handed over whole or not at all"
    assert (core.scheduler.requests, core._live) == ({}, set())
    assert not llm.engine._outputs
    assert [o.text for o in llm.generate("c", TEN)] == ["xyz"]


def test_a_dead_engine_raises_and_goes_on_raising(make_llm: Any, executor_of: Any) -> None:
    llm = make_llm("abc", "abc")
    executor_of(llm.engine).fail_at = 2
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="no room left on the device"):
            llm.generate(["x", "y"], TEN)


def test_chat_takes_one_conversation_or_several(make_llm: Any) -> None:
    llm = make_llm("ab", "cd", "ef")
    one = [{"role": "user", "content": "hi"}]
    assert [o.text for o in llm.chat(one, TEN)] == ["ab"]
    outputs = llm.chat([one, [*one, {"role": "assistant", "content": "ab"}, *one]], TEN)
    assert [o.text for o in outputs] == ["cd", "ef"]
    assert len(outputs[1].prompt_token_ids) > len(outputs[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ([[{"role": "user", "content": "a"}], []], r"prompts\[1\]: messages is empty"),
        ([{"role": "robot", "content": "a"}], "may speak"),
        ([{"content": "a"}], "text 'role'"),
        ({"role": "user", "content": "a"}, "must be a list of dicts"),
        ("hi", "must be a list of dicts"),
    ],
)
def test_conversations_that_are_none(make_llm: Any, messages: Any, message: str) -> None:
    with pytest.raises(RequestFailed, match=message):
        make_llm().chat(messages, TEN)


def test_progress_bar_shows_rates_when_asked(make_llm: Any, capsys: Any) -> None:
    make_llm("abc", "abc").generate(["x", "y"], TEN)
    assert capsys.readouterr().err == ""
    make_llm("abc", "abc").generate(["x", "y"], SamplingParams(n=3, max_tokens=10), use_tqdm=True)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tok/s" in shown


@pytest.mark.parametrize("batches", [1, 3])
def test_workers_that_are_called_have_heard_of_the_end_of_all_requests(make_llm: Any, executor_of: Any, batches: int) -> None:
    llm = make_llm("ab", "abcdef", batches=batches)
    executor = executor_of(llm.engine)
    executor._look = lambda: sorted(executor.rows)
    llm.generate("x", TEN)
    assert llm.collective_rpc("look") == [[]]
    llm.engine.add_request("1", "y", TEN)
    llm.engine.step()
    assert llm.collective_rpc("look") == [[0]], "it goes on"
    llm.engine.abort_request("1")
    assert llm.collective_rpc("look") == [[]]
    [last] = llm.engine.step()
    assert (last.request_id, last.outputs[0].finish_reason) == ("1", "abort")
