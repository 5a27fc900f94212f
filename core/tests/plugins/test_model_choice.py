"""Which provider runs a model: one that lists its architecture, one that accepts it, or the one that ``model_impl`` names."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pegboard.contracts.model_source import ModelSource
from pegboard.plugins import ModelProvider, PluginError, UnknownProviderError
from pegboard.testing.plugins import compose_with

pytestmark = pytest.mark.usefixtures("standard")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Architecture and ``model_impl`` of each question whether a model is accepted. Refused is what is called "Strange"."""
    calls: list[tuple[str, str]] = []

    def accepts(source: Any, config: Any) -> list[str]:
        (architecture,) = source.config["architectures"]
        calls.append((architecture, config.model_impl))
        return ["it looks ahead", "it forgets"] if "Strange" in architecture else []

    def fails(source: Any, config: Any) -> list[str]:
        raise OSError("disk")

    monkeypatch.setitem(sys.modules, "acceptance", SimpleNamespace(accepts=accepts, fails=fails))  # type: ignore[arg-type]
    return calls


def composed(architecture: str, impl: str = "auto", accepts: str = "acceptance:accepts") -> Any:
    general = ModelProvider(name="any", target="nowhere:Any", spec="fake_standard:spec", accepts=accepts)
    source = ModelSource("it", "/it", "dummy", "hf", {"architectures": [architecture]})
    hooks: dict[str, Any] = {"models": lambda: [general], "resolve_model": lambda ref: source if ref == "it" else None}
    return compose_with(hooks, model="it", model_impl=impl)


def test_auto_takes_one_that_lists_the_architecture(asked: list[tuple[str, str]]) -> None:
    composition = composed("TinyForCausalLM")
    assert (composition.parts["model"].name, composition.reasons["model"]) == ("tiny", "implements TinyForCausalLM (standard)")
    assert composed("TinyForCausalLM", "native").parts["model"].name == "tiny"
    assert asked == []


def test_auto_asks_where_none_does(asked: list[tuple[str, str]]) -> None:
    composition = composed("OtherForCausalLM")
    assert composition.parts["model"].name == "any"
    assert composition.reasons["model"] == "accepts OtherForCausalLM, which no other implements"
    assert asked == [("OtherForCausalLM", "auto")]


def test_a_named_one_is_taken(asked: list[tuple[str, str]]) -> None:
    composition = composed("TinyForCausalLM", "any")
    assert (composition.parts["model"].name, composition.reasons["model"]) == ("any", "model_impl = 'any'")
    assert composed("TinyForCausalLM", "tiny").parts["model"].name == "tiny"
    assert asked == [("TinyForCausalLM", "any")]


@pytest.mark.parametrize(
    ("architecture", "impl", "told"),
    [
        (
            "StrangeForCausalLM",
            "auto",
            r"architecture of /it \(StrangeForCausalLM\); .*any cannot run it: it looks ahead; it forgets",
        ),
        ("StrangeForCausalLM", "any", r"model_impl: 'any' cannot run StrangeForCausalLM of /it: it looks ahead; it forgets"),
        ("OtherForCausalLM", "native", r"\(OtherForCausalLM\); supported: TinyForCausalLM.*'native' leaves 'any' out"),
        ("OtherForCausalLM", "tiny", "model_impl: 'tiny' does not implement OtherForCausalLM of /it, but TinyForCausalLM"),
    ],
)
@pytest.mark.usefixtures("asked")
def test_what_cannot_run_it_says_why(architecture: str, impl: str, told: str) -> None:
    with pytest.raises(PluginError, match=told):
        composed(architecture, impl)


@pytest.mark.usefixtures("asked")
def test_a_name_that_means_nothing(asked: list[tuple[str, str]]) -> None:
    with pytest.raises(UnknownProviderError, match=r"^model_impl: no model is called 'tinny'.*did you mean 'tiny'"):
        composed("TinyForCausalLM", "tinny")


@pytest.mark.usefixtures("asked")
def test_a_failing_question_names_who_was_asked() -> None:
    with pytest.raises(PluginError, match=r"model 'any' of plugin 'acme'.*acceptance:fails raised OSError: disk"):
        composed("OtherForCausalLM", accepts="acceptance:fails")
