"""Whether so many ranks can share a model is known before any of them starts."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pegboard.config import ConfigError
from pegboard.plugins import CompositionError, ExecutorProvider, ModelProvider
from pegboard.plugins.parallel import head_layers, stage_layers, undivided, undivided_heads
from pegboard.testing.fake_composition import fake_spec
from pegboard.testing.plugins import compose_with

pytestmark = pytest.mark.usefixtures("standard")
EXECUTOR = ExecutorProvider(name="several", target="nowhere:Several", capabilities=frozenset({"tp", "pp"}))


def composed(model: ModelProvider | None = None, **executor: Any) -> Any:
    hooks: dict[str, Any] = {"executors": lambda: [EXECUTOR]}
    if model is not None:
        hooks["models"] = lambda: [model]
    return compose_with(hooks, executor={"name": "several", **executor})


def model(**options: Any) -> ModelProvider:
    return ModelProvider(
        name="mine", target="nowhere:Mine", spec="fake_standard:spec", architectures=("TinyForCausalLM",), **options
    )


def test_layers_of_stages() -> None:
    def sizes(num_layers: int, stages: int, split: Any = None) -> list[int]:
        found = stage_layers(num_layers, stages, split)
        assert [i for layers in found for i in layers] == list(range(num_layers)), "each layer once"
        return [len(layers) for layers in found]

    assert [sizes(5, n) for n in (1, 2, 3, 4, 5)] == [[5], [3, 2], [2, 2, 1], [2, 1, 1, 1], [1] * 5]
    assert [sizes(10, n) for n in (2, 3, 4)] == [[5, 5], [4, 3, 3], [3, 3, 2, 2]]
    assert sizes(5, 2, (1, 4)) == [1, 4]
    assert stage_layers(0, 1) == [range(0)], "a model without layers runs on one rank"


@pytest.mark.parametrize(
    ("num_layers", "stages", "head", "sizes"),
    [
        (30, 2, 4.0, [17, 13]),
        (30, 4, 4.0, [9, 9, 8, 4]),
        (5, 2, 0.4, [3, 2]),
        (6, 2, 100.0, [5, 1]),
        (4, 4, 9.0, [1, 1, 1, 1]),
        (9, 1, 9.0, [9]),
    ],
)
def test_the_head_counts_in_the_last_stage(num_layers: int, stages: int, head: float, sizes: list[int]) -> None:
    assert [len(layers) for layers in stage_layers(num_layers, stages, head=head)] == sizes
    explicit = [1] * (stages - 1) + [num_layers - stages + 1]
    assert [len(layers) for layers in stage_layers(num_layers, stages, explicit, head)] == explicit


@given(num_layers=st.integers(1, 40), stages=st.integers(1, 6), quarters=st.integers(0, 200))
def test_no_split_is_faster(num_layers: int, stages: int, quarters: int) -> None:
    assume(stages <= num_layers)
    head = quarters / 4
    sizes = [len(layers) for layers in stage_layers(num_layers, stages, head=head)]
    slowest = max([*sizes[:-1], sizes[-1] + head])
    fewer = math.ceil(slowest) - 1  # layers that a stage would be left with if it were faster
    room = fewer * (stages - 1) + max(1, math.ceil(slowest - head) - 1)
    assert room < num_layers or slowest == 1 + head, "a faster one would not hold all layers"


def test_what_the_head_costs() -> None:
    spec = replace(fake_spec(), vocab_size=1000, hidden_size=64, layer_weights=16000)
    assert head_layers(spec) == 2.0
    assert head_layers(replace(spec, layer_weights=0)) == 0.0, "a model that does not say"


@pytest.mark.parametrize(
    ("stages", "split", "message"),
    [
        (6, None, "5 layers are not enough for 6 stages"),
        (2, (5,), "over 1 stages, and there are 2"),
        (2, (2, 2), r"\[2, 2\] does not split 5 layers: it adds up to 4"),
        (2, (5, 0), "a stage holds one at least"),
    ],
)
def test_what_is_no_split(stages: int, split: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stage_layers(5, stages, split)


def test_heads_that_do_not_divide() -> None:
    spec = replace(fake_spec(), num_heads=12, num_kv_heads=4)
    working = [ranks for ranks in range(1, 13) if not undivided_heads(spec, ranks)]
    assert working == [1, 2, 4, 12], "with 12, three ranks each hold the same key head"
    assert undivided({"width": 10, "height": 12}, 4) == ["width is 10, which 4 does not divide"]


def test_sizes_are_checked_with_the_parts() -> None:
    assert composed(tensor_parallel_size=4, pipeline_parallel_size=4).spec.num_heads == 4
    with pytest.raises(ConfigError, match=r"num_attention_heads is 4, which 3 does not divide.*work for this model: 1, 2, 4\)"):
        composed(tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="5 stages need as many layers, and the model has 4"):
        composed(pipeline_parallel_size=5)
    with pytest.raises(ConfigError, match=r"\[1, 2\] does not split 4 layers.*without it, the split is 2, 2"):
        composed(pipeline_parallel_size=2, pipeline_split=(1, 2))
    with pytest.raises(CompositionError, match=r"(?s)which 3 does not divide.*no communicator is called 'nix'"):
        composed(tensor_parallel_size=3, communicator="nix")


def odd_numbers_only(spec: Any, ranks: int) -> list[str]:
    return [] if ranks % 2 else [f"{ranks} is even"]


def test_a_model_may_have_a_rule_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_rules", SimpleNamespace(odd=odd_numbers_only))
    mine = model(capabilities=frozenset({"tp"}), parallel="my_rules:odd")
    assert composed(mine, tensor_parallel_size=3).parts["model"].name == "mine"
    with pytest.raises(ConfigError, match=r"2 is even \(numbers that work for this model: 1, 3\)"):
        composed(mine, tensor_parallel_size=2)
    with pytest.raises(RuntimeError, match=r"model 'mine' of .*: my_rules:even raised PluginError"):
        composed(model(capabilities=frozenset({"tp"}), parallel="my_rules:even"), tensor_parallel_size=3)


def test_a_model_may_have_a_rule_for_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_rules", SimpleNamespace(odd=odd_numbers_only))
    mine = model(capabilities=frozenset({"pp"}), stages="my_rules:odd")
    assert composed(mine, pipeline_parallel_size=3).parts["model"].name == "mine"
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size: 2 stages cannot share the layers: 2 is even \(set it to 1\)"):
        composed(mine, pipeline_parallel_size=2)


@pytest.mark.parametrize("field", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_a_model_that_says_nothing_runs_on_one_rank(field: str) -> None:
    assert composed(model()).parts["model"].name == "mine"
    with pytest.raises(CompositionError, match=rf"executor.{field} = 2 needs capability .* of the model.* set it to 1"):
        composed(model(), **{field: 2})
