"""GrammarManager: compiles that are shared, slow, wrong or without end, and states of which one fails alone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest

from pegboard.config import EngineConfig
from pegboard.contracts.grammar import Grammar, GrammarState
from pegboard.contracts.model import ModelSpec
from pegboard.engine import grammar_compiler
from pegboard.engine.grammars import GrammarManager, Ready
from pegboard.testing.choice_grammars import ChoiceGrammars
from pegboard.testing.fake_composition import FakeComposition
from pegboard.testing.list_tokenizer import ListTokenizer
from pegboard.wire import EngineCoreRequest, GrammarSpec, SamplingParams

TOKENS = [None, *(bytes([byte]) for byte in b"abcdefghijklmnopqrstuvwxyz"), b"yes", *[None] * 12]
VOCAB = len(TOKENS)
ROW = 8
EOS, YES = 0, 27


def letters(text: str) -> list[int]:
    return [1 + ord(c) - ord("a") for c in text]


class Backend(ChoiceGrammars):
    """Compiles a text when its gate is open. ``compiled``: texts whose compile has begun, in order."""

    def __init__(self) -> None:
        spec = ModelSpec(
            architecture="Fake", vocab_size=VOCAB, hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_size=8,
            max_model_len=99, eos_token_ids=(EOS,),
        )  # fmt: skip
        super().__init__(FakeComposition(EngineConfig(model="x"), {"tokenizer": lambda: ListTokenizer(TOKENS)}, spec))  # type: ignore[arg-type]
        self.gates: dict[str, threading.Event] = {}
        self.compiled: list[str] = []
        self.states: list[GrammarState] = []

    def compile(self, spec: GrammarSpec) -> Grammar:
        self.compiled.append(spec.text)
        gate = self.gates.get(spec.text)
        assert gate is None or gate.wait(30)
        if spec.text == "crash":
            raise ZeroDivisionError("a fault of the backend")
        return super().compile(spec)


def request(request_id: str, *choices: str, text: str | None = None) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1],
        sampling=SamplingParams(),
        stop_token_ids=[EOS],
        max_tokens=9,
        arrival_time=0.0,
        grammar=GrammarSpec("choice", json.dumps(choices) if text is None else text),
    )


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def manager(backend: Backend) -> Iterable[GrammarManager]:
    manager = GrammarManager(lambda: backend, VOCAB)
    yield manager
    for gate in backend.gates.values():
        gate.set()
    manager.close()


def await_ready(manager: GrammarManager, count: int = 1) -> list[Ready]:
    ready: list[Ready] = []
    until = time.monotonic() + 30
    while len(ready) < count:
        assert time.monotonic() < until, f"only {ready} are ready"
        manager.wait(0.5)
        ready += manager.take_ready()
    return ready


def begin(manager: GrammarManager, *requests: EngineCoreRequest) -> None:
    for each in requests:
        manager.enqueue(each)
    assert [ready.error for ready in await_ready(manager, len(requests))] == [None] * len(requests)


def rows(manager: GrammarManager, *request_ids: str) -> list[set[int]]:
    output = manager.bitmasks(7, list(range(3, 3 + len(request_ids))), request_ids)
    assert (output.step_id, output.slots) == (7, list(range(3, 3 + len(request_ids))))
    assert type(output.bitmask) is bytes
    assert len(output.bitmask) == ROW * len(request_ids)
    masks = [int.from_bytes(output.bitmask[i * ROW : (i + 1) * ROW], "little") for i in range(len(request_ids))]
    return [{bit for bit in range(8 * ROW) if mask >> bit & 1} for mask in masks]


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_equal_grammars_are_compiled_once(manager: GrammarManager, backend: Backend) -> None:
    begin(manager, request("a", "yes", "no"), request("b", "yes", "no"), request("c", "maybe"))
    manager.enqueue(request("d", "maybe"))
    assert [(r.request.request_id, r.error) for r in manager.take_ready()] == [("d", None)], "known: it is ready at once"
    assert sorted(backend.compiled) == ['["maybe"]', '["yes", "no"]']
    assert manager.num_waiting == 0


def test_the_backend_is_made_with_the_first_grammar(backend: Backend) -> None:
    made: list[str] = []

    def make() -> Backend:
        made.append(threading.current_thread().name)
        return backend

    manager = GrammarManager(make, VOCAB)
    before = threading.active_count()
    assert (made, manager.take_ready(), manager.num_waiting) == ([], [], 0)
    begin(manager, request("a", "x"), request("b", "y"))
    assert made == ["pegboard-grammar"], "not on the thread of the step loop"
    manager.close()
    manager.close()
    assert threading.active_count() <= before
    assert not [t for t in threading.enumerate() if t.name == "pegboard-grammar"]


def test_a_backend_that_cannot_be_made_fails_requests(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Backend:
        raise ImportError("no module named quux")

    manager = GrammarManager(make, VOCAB)
    manager.enqueue(request("a", "x"))
    assert await_ready(manager)[0].error == "the grammar backend failed: ImportError: no module named quux"
    manager.close()


def test_a_bad_grammar_fails_alone(manager: GrammarManager, caplog: pytest.LogCaptureFixture) -> None:
    manager.enqueue(request("bad", text="[]"))
    manager.enqueue(request("bad too", text="[]"))
    manager.enqueue(request("crash", text="crash"))
    manager.enqueue(request("good", "yes"))
    errors = {ready.request.request_id: ready.error for ready in await_ready(manager, 4)}
    assert errors["good"] is None
    assert errors["bad"] == errors["bad too"] == "choices are a JSON list of non-empty texts, but this is []"
    assert errors["crash"] == "the grammar backend failed: ZeroDivisionError: a fault of the backend"
    assert "ZeroDivisionError" in caplog.text, "a fault of the backend is logged with its traceback"
    assert "no JSON" not in caplog.text
    assert rows(manager, "good") == [{25, YES}]


def test_a_compile_without_end_fails_its_request_alone(backend: Backend) -> None:
    backend.gates['["slow"]'] = threading.Event()
    manager = GrammarManager(lambda: backend, VOCAB, num_threads=1, timeout=0.05)
    manager.enqueue(request("slow", "slow"))
    [late] = await_ready(manager)
    assert late.error is not None
    assert "structured_outputs.compile_timeout=0.05 s" in late.error
    manager._timeout = 30.0
    begin(manager, request("other", "yes"))  # although the only thread is still busy
    manager.enqueue(request("slow again", "slow"))
    backend.gates['["slow"]'].set()
    assert [(r.request.request_id, r.error) for r in await_ready(manager)] == [("slow again", None)]
    assert backend.compiled == ['["slow"]', '["yes"]'], "what came too late for one is there for the next"
    begin(manager, request("more", "no"))
    manager.close()


def test_threads_are_not_lost_without_limit(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_LOST", 2)
    manager = GrammarManager(lambda: backend, VOCAB, num_threads=1, timeout=0.02)
    gate = threading.Event()
    for i in range(5):
        text = json.dumps([f"slow{chr(97 + i)}"])
        backend.gates[text] = gate
        manager.enqueue(request(f"r{i}", text=text))
        assert "compile_timeout" in str(await_ready(manager)[0].error)
    assert len(backend.compiled) == 3
    assert len([t for t in threading.enumerate() if t.name == "pegboard-grammar"]) == 3
    gate.set()
    manager._timeout = 30.0
    begin(manager, request("after", "yes"))
    manager.close()


def test_engines_that_agree_take_requests_in_the_same_turns(backend: Backend) -> None:
    """Each tells what is over for it, however it goes here; what all say decides, in the order in which requests came."""
    told: list[dict[str, str | None]] = []
    verdicts: list[dict[str, str | None]] = []

    def agree(over: Any) -> dict[str, str | None]:
        told.append(dict(over))
        return verdicts.pop(0) if verdicts else {}

    backend.gates['["slow"]'] = threading.Event()
    manager = GrammarManager(lambda: backend, VOCAB, agree=agree)
    assert manager.take_ready() == [], "nobody waits: nothing to agree on"
    assert told == []
    for name in ("slow", "fast", "quick"):
        manager.enqueue(request(name, name))
    until = time.monotonic() + 30
    while "quick" not in (told or [{}])[-1] or "fast" not in told[-1]:
        assert time.monotonic() < until
        assert manager.take_ready() == [], "the others are not ready"
        time.sleep(0.001)
    verdicts[:] = [{"fast": None, "slow": "another engine could not compile it"}, {"quick": None}]
    ready = manager.take_ready()
    assert [(r.request.request_id, r.error) for r in ready] == [("slow", "another engine could not compile it"), ("fast", None)]
    assert told[-1] == {"fast": None, "quick": None}
    assert [r.request.request_id for r in manager.take_ready()] == ["quick"]
    assert told[-1] == {"quick": None}
    assert len(rows(manager, "fast", "quick")) == 2
    assert manager.num_waiting == 0
    backend.gates['["slow"]'].set()
    manager.close()


def test_requests_that_are_dropped_while_they_wait(manager: GrammarManager, backend: Backend) -> None:
    for name in ("one", "two", "three"):
        backend.gates[json.dumps([name])] = threading.Event()
    manager.enqueue(request("a", "one"))
    manager.enqueue(request("b", "two"))
    manager.enqueue(request("c", "three"))
    manager.enqueue(request("d", "three"))
    assert manager.num_waiting == 4
    assert manager.drop(["a", "unknown", "c", "a"]) == ["a", "c"]
    for gate in backend.gates.values():
        gate.set()
    assert {ready.request.request_id for ready in await_ready(manager, 2)} == {"b", "d"}
    manager.enqueue(request("e", "one"))
    assert manager.drop(None) == ["e"]
    assert (manager.num_waiting, manager.drop(None)) == (0, [])


def test_what_nobody_waits_for_is_not_compiled(backend: Backend) -> None:
    manager = GrammarManager(lambda: backend, VOCAB, num_threads=1)
    backend.gates['["first"]'] = threading.Event()
    manager.enqueue(request("a", "first"))
    manager.enqueue(request("b", "second"))
    manager.drop(["b"])
    manager.enqueue(request("c", "third"))
    backend.gates['["first"]'].set()
    await_ready(manager, 2)
    assert backend.compiled == ['["first"]', '["third"]']
    manager.close()


def test_waiting_ends_with_the_compile(manager: GrammarManager, backend: Backend) -> None:
    manager.wait(30)  # nobody waits
    gate = backend.gates['["x"]'] = threading.Event()
    manager.enqueue(request("a", "x"))
    assert manager.take_ready() == []
    manager.wait(0.01)
    assert manager.take_ready() == []
    threading.Timer(0.05, gate.set).start()
    manager.wait(30)
    assert [ready.error for ready in manager.take_ready()] == [None]


def test_grammars_that_were_long_not_asked_for_are_given_up(
    manager: GrammarManager, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "KEPT", 2)
    for i, text in enumerate(["a", "b", "a", "c", "a", "b"]):
        begin(manager, request(f"r{i}", text))
    assert backend.compiled == ['["a"]', '["b"]', '["c"]', '["b"]']


# -- states ------------------------------------------------------------------------------------------------------------


def test_masks_and_tokens(manager: GrammarManager) -> None:
    begin(manager, request("a", "yes", "no"), request("b", "yes", "yesyes"))
    assert rows(manager, "b", "a") == [{25, YES}, {25, YES, 14}]
    assert manager.accept("a", letters("n")) is None
    assert not manager.terminated("a")
    assert manager.accept("b", [YES]) is None
    assert rows(manager, "a", "b") == [{15}, {25, YES, EOS}]
    assert manager.accept("a", letters("o")) is None
    assert manager.terminated("a")
    assert not manager.terminated("b")
    assert rows(manager, "a") == [{EOS}]
    for request_id in ("a", "a", "unknown"):
        manager.forget(request_id)
    assert rows(manager, "b") == [{25, YES, EOS}]


def test_tokens_that_do_not_fit_are_told(manager: GrammarManager) -> None:
    begin(manager, request("a", "yes"))
    assert "[1, 2]" in str(manager.accept("a", [1, 2]))
    assert "[1, 2]" in str(manager.accept("a", [YES])), "it cannot go on"
    assert not manager.terminated("a")


class Broken(GrammarState):
    def __init__(self, error: Exception, at: str) -> None:
        self.error, self.at = error, at

    def accept(self, token_ids: Any) -> bool:
        return self._fail_at("accept")

    def rollback(self, num_tokens: int) -> None: ...

    def fill_bitmask(self, bitmask: memoryview) -> None:
        bitmask[:3] = b"abc"
        self._fail_at("mask")

    def _fail_at(self, place: str) -> bool:
        if place == self.at:
            raise self.error
        return True

    terminated = True  # type: ignore[assignment]


class BreakingBackend(Backend):
    """Texts that begin with b break in ``at``."""

    at = "mask"
    error: Exception = ValueError("it has become too large")

    def compile(self, spec: GrammarSpec) -> Grammar:
        grammar = super().compile(spec)
        if not spec.text.startswith('["b'):
            return grammar
        return type("BreakingGrammar", (Grammar,), {"start": lambda _: self.start()})()

    def start(self) -> GrammarState:
        if self.at == "start":
            raise self.error
        return Broken(self.error, self.at)


def test_a_mask_that_cannot_be_computed_ends_its_request_alone() -> None:
    backend = BreakingBackend()
    manager = GrammarManager(lambda: backend, VOCAB)
    begin(manager, request("a", "yes"), request("broken", "bad"), request("c", "no"))
    assert rows(manager, "a", "broken", "c") == [{25, YES}, set(range(8 * ROW)) - {EOS}, {14}]
    for token_ids in ([5], [6]):
        assert manager.accept("broken", token_ids) == "it has become too large"
    assert not manager.terminated("broken")
    assert manager.accept("a", [YES]) is None
    begin(manager, request("again", "bad"))
    assert backend.compiled.count('["bad"]') == 2, "what may be shared with a broken state is not used again"
    manager.close()


def test_what_a_state_raises_ends_its_request(caplog: pytest.LogCaptureFixture) -> None:
    backend = BreakingBackend()
    backend.at, backend.error = "accept", KeyError("oops")
    manager = GrammarManager(lambda: backend, VOCAB)
    begin(manager, request("broken", "bad"))
    assert manager.accept("broken", [1]) == "the grammar backend failed: KeyError: 'oops'"
    backend.at = "start"
    manager.enqueue(request("never", "bed"))
    assert await_ready(manager)[0].error == "the grammar backend failed: KeyError: 'oops'"
    manager.close()
