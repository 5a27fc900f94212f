"""Requests with a grammar in the engine core: they wait for it, and nobody else does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from pegboard.contracts.grammar import Grammar
from pegboard.engine.core import EngineCore
from pegboard.testing.choice_grammars import ChoiceGrammars
from pegboard.wire import EngineCoreOutput, EngineCoreRequest, FinishReason, GrammarSpec, SamplingParams

GRAMMAR = GrammarSpec("choice", '["ab"]')
SCRIPT = {"a": "abc", "b": "bcd", "c": "cde", "plain": "xyz"}


class Backend(ChoiceGrammars):
    """Compiles nothing before ``gate`` is open, and what its text says is bad not at all."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.running = threading.Event()

    def compile(self, spec: GrammarSpec) -> Grammar:
        self.running.set()
        assert self.gate.wait(30)
        if spec.text == "bad":
            raise ValueError("this grammar is bad")
        return type("Any", (Grammar,), {"start": lambda _: object()})()


@pytest.fixture
def backend() -> Iterable[Backend]:
    backend = Backend()
    yield backend
    backend.gate.set()


MakeCore = Callable[..., EngineCore]


@pytest.fixture
def make_core(make_engine: Any, backend: Backend) -> MakeCore:
    def make(**facts: Any) -> EngineCore:
        core: EngineCore = make_engine(SCRIPT, **{"grammar": backend, **facts}).client.core
        return core

    return make


def request(name: str, grammar: GrammarSpec | None = GRAMMAR, prompt: int = 3, **fields: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=f"{name}@0",
        prompt_token_ids=[1] * prompt,
        sampling=SamplingParams(**fields),
        stop_token_ids=[0],
        max_tokens=50,
        arrival_time=0.0,
        grammar=grammar,
    )


def drain(core: EngineCore) -> dict[str, list[EngineCoreOutput]]:
    news: dict[str, list[EngineCoreOutput]] = {}
    until = time.monotonic() + 30
    while core.has_requests():
        assert time.monotonic() < until, f"not finished, with {news}"
        for output in core.step():
            news.setdefault(output.request_id, []).append(output)
    return news


def ends(news: dict[str, list[EngineCoreOutput]]) -> dict[str, Any]:
    assert all(sum(o.finish_reason is not None for o in outputs) == 1 for outputs in news.values())
    return {request_id: (outputs[-1].finish_reason, outputs[-1].stop_reason) for request_id, outputs in news.items()}


def test_others_go_on_while_a_grammar_is_compiled(make_core: MakeCore, backend: Backend) -> None:
    core = make_core()
    core.add_request(request("a"))
    core.add_request(request("plain", None))
    assert core.stats().num_waiting == 1
    plain = [core.step()[0] for _ in range(4)]
    assert [o.request_id for o in plain] == ["plain@0"] * 4
    assert plain[-1].finish_reason is FinishReason.STOP
    assert core.has_requests(), "one waits for its grammar"
    backend.gate.set()
    news = drain(core)
    assert [t for o in news["a@0"] for t in o.new_token_ids] == [1, 2, 3, 0]
    assert core.stats().num_waiting == 0


def test_a_step_with_nothing_else_to_do_waits_a_little(make_core: MakeCore, backend: Backend) -> None:
    core = make_core()
    core.add_request(request("a"))
    assert core.step() == []
    assert not core.scheduler.has_requests()
    threading.Timer(0.03, backend.gate.set).start()
    steps = 0
    while not core.scheduler.has_requests():
        core.step()
        steps += 1
    assert steps < 1000, "it spins"
    assert "a@0" in drain(core)


def test_answers_to_one_prompt_come_to_the_scheduler_together(make_core: MakeCore, backend: Backend) -> None:
    core = make_core()
    for name in "abc":
        core.add_request(request(name))
    backend.gate.set()
    while not core.scheduler.has_requests():
        core.step()
    assert list(core.scheduler.requests) == ["a@0", "b@0", "c@0"]  # type: ignore[attr-defined]
    assert set(drain(core)) <= {"a@0", "b@0", "c@0"}


def test_a_known_grammar_costs_no_wait(make_core: MakeCore, backend: Backend) -> None:
    core = make_core()
    backend.gate.set()
    core.add_request(request("a"))
    drain(core)
    core.add_request(request("b"))
    core.add_request(request("plain", None))
    assert list(core.scheduler.requests) == ["b@0", "plain@0"]  # type: ignore[attr-defined]


def test_a_grammar_that_cannot_be_compiled_ends_its_request(make_core: MakeCore, backend: Backend) -> None:
    core = make_core()
    core.add_request(request("a", GrammarSpec("choice", "bad")))
    core.add_request(request("b"))
    core.add_request(request("plain", None))
    backend.gate.set()
    assert ends(drain(core)) == {
        "a@0": (FinishReason.ERROR, "this grammar is bad"),
        "b@0": (FinishReason.STOP, 0),
        "plain@0": (FinishReason.STOP, 0),
    }
    core.add_request(request("a"))  # its id is free again
    assert ends(drain(core)) == {"a@0": (FinishReason.STOP, 0)}


def test_a_compile_that_takes_too_long_ends_its_request(make_core: MakeCore) -> None:
    core = make_core(config={"structured_outputs": {"compile_timeout": 0.05}})
    core.add_request(request("a"))
    [(reason, message)] = ends(drain(core)).values()
    assert reason is FinishReason.ERROR
    assert "compile_timeout=0.05 s" in message


def test_what_the_scheduler_refuses_later_ends_with_its_message(make_core: MakeCore, backend: Backend) -> None:
    core = make_core()
    backend.gate.set()
    core.add_request(request("a", prompt=100_000))
    core.add_request(request("b"))
    assert ends(drain(core)) == {
        "a@0": (FinishReason.ERROR, "the prompt can never fit the KV pool"),
        "b@0": (FinishReason.STOP, 0),
    }


def test_abort_while_the_grammar_is_compiled(make_core: MakeCore, backend: Backend) -> None:
    core = make_core()
    for name in "abc":
        core.add_request(request(name))
    core.add_request(request("plain", None))
    assert core.abort_requests(["b@0", "unknown"]) == ["b@0"]
    core.add_request(request("b"))
    assert sorted(core.abort_requests(None)) == ["a@0", "b@0", "c@0", "plain@0"]
    backend.gate.set()
    assert drain(core) == {}
    assert core.abort_requests(iter(["a@0"])) == []


def test_abort_of_a_request_that_has_failed_untold(make_core: MakeCore, backend: Backend) -> None:
    core = make_core()
    core.add_request(request("a", GrammarSpec("choice", "bad")))
    backend.gate.set()
    until = time.monotonic() + 30
    while core.grammars.num_waiting:
        assert time.monotonic() < until
        core.grammars.wait(1)
        core._hand_over()
    assert core.has_requests()
    assert core.abort_requests(["a@0"]) == ["a@0"]
    assert not core.has_requests()
    assert core.step() == []


def test_ids_in_use_are_refused_wherever_they_are(make_core: MakeCore, backend: Backend) -> None:
    core = make_core()
    core.add_request(request("a"))
    core.add_request(request("b", None))
    for name in "ab":
        for grammar in (GRAMMAR, None):
            with pytest.raises(ValueError, match=f"'{name}@0' is still in use"):
                core.add_request(request(name, grammar))
    backend.gate.set()
    assert set(ends(drain(core))) == {"a@0", "b@0"}


def test_what_is_not_served_is_refused_at_once(make_core: MakeCore) -> None:
    bare = make_core(capabilities=frozenset({"async_steps"}))
    with pytest.raises(ValueError, match=r"needs grammars, which scheduler 'page' does not serve; .*scheduler.name"):
        bare.add_request(request("a"))
    with pytest.raises(ValueError, match="needs prompt_logprobs, which scheduler 'page' does not serve"):
        bare.add_request(request("a", None, prompt_logprobs=0))
    bare.add_request(request("plain", None))
    assert "plain@0" in drain(bare)
    without = make_core(grammar=None)
    with pytest.raises(ValueError, match="no grammar backend is installed"):
        without.add_request(request("a"))
    without.add_request(request("plain", None, prompt_logprobs=0))
    assert "plain@0" in drain(without)


def test_without_grammars_no_backend_is_made(make_engine: Any) -> None:
    def make() -> Backend:
        raise AssertionError("nobody asked for one")

    core: EngineCore = make_engine(SCRIPT, grammar=make).client.core
    core.add_request(request("plain", None))
    assert "plain@0" in drain(core)
    assert not [t for t in threading.enumerate() if t.name == "pegboard-grammar"]


def test_shutdown_ends_the_threads(make_core: MakeCore, backend: Backend) -> None:
    core = make_core()
    core.add_request(request("a"))
    core.add_request(request("b", GrammarSpec("choice", "bad")))
    assert backend.running.wait(30)
    backend.gate.set()
    core.shutdown()
    assert not [t for t in threading.enumerate() if t.name == "pegboard-grammar"]
    assert not core.has_requests()
