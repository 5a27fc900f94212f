"""What parts and plugins have to say about a request, wired from a composition."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.contracts.logits_processor import LogitsProcessor
from pegboard.plugins import LogitsProcessorProvider
from pegboard.plugins.errors import PluginError
from pegboard.wire import GrammarSpec, SamplingParams, StructuredOutputs


class Picky(LogitsProcessor):
    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if params.top_k:
            raise ValueError(f"top_k={params.top_k} and this processor do not go together")

    def update_state(self, delta: Any) -> None: ...

    def apply(self, logits: Any, rows: Any) -> Any: ...


def factory() -> LogitsProcessor:
    """A target need not be a class."""
    return Picky()


class Backend:
    def __init__(self) -> None:
        self.validated: list[GrammarSpec] = []

    def validate(self, spec: GrammarSpec) -> None:
        self.validated.append(spec)
        if "bad" in spec.text:
            raise ValueError("that is no language")


def constrained(**language: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputs(**language))


def test_logits_processors_in_use_look_at_the_parameters(make_engine: Any) -> None:
    providers = [LogitsProcessorProvider(name=f.__name__, target=f) for f in (Picky, factory)]
    engine = make_engine({}, logits_processors=providers)
    engine.input.process("a", "hi", SamplingParams())
    with pytest.raises(ValueError, match="top_k=3 and this processor do not go together"):
        engine.input.process("a", "hi", SamplingParams(top_k=3))
    make_engine({}).input.process("a", "hi", SamplingParams(top_k=3))


def test_the_grammar_backend_is_made_once_when_it_is_first_needed(make_engine: Any) -> None:
    made: list[Backend] = []

    def make() -> Backend:
        made.append(Backend())
        return made[-1]

    engine = make_engine({}, grammar=make)
    engine.input.process("a", "hi", SamplingParams())
    before = len(made)
    for _ in range(3):
        request = engine.input.process("a", "hi", constrained(regex="a+")).request
        assert request.grammar == GrammarSpec("regex", "a+")
    with pytest.raises(ValueError, match=r"structured_outputs.grammar: that is no language"):
        engine.input.process("a", "hi", constrained(grammar="bad"))
    assert len(made) == before + 1
    assert len(made[-1].validated) == 4


def test_a_backend_that_cannot_be_had_refuses_the_request(make_engine: Any) -> None:
    def make() -> Any:
        raise PluginError("grammar 'fake' cannot be loaded: ModuleNotFoundError: no module named 'acme'")

    engine = make_engine({"b": "ab"})
    with pytest.raises(ValueError, match=r"structured_outputs.regex needs a grammar backend, and there is none"):
        engine.add_request("a", "hi", constrained(regex="a"))
    engine = make_engine({"b": "ab"}, grammar=lambda: Backend())
    engine.input._checks.grammar._composition.grammar = make
    with pytest.raises(ValueError, match=r"the grammar backend cannot be used: .*no module named 'acme'"):
        engine.add_request("a", "hi", constrained(regex="a"))


def test_an_engine_with_a_seed_repeats_itself(make_engine: Any) -> None:
    def seeds(**config: Any) -> list[int]:
        engine = make_engine({}, config=config)
        return [engine.input.process("x", "hi", SamplingParams()).request.sampling.seed for _ in range(3)]

    assert seeds(seed=3) == seeds(seed=3) != seeds(seed=4)
    assert len({*seeds(), *seeds()}) == 6
