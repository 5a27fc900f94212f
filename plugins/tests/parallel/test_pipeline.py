"""Stages that share the layers: none is missing or held twice, and answers are those of one rank."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM, SamplingParams
from pegboard.engine.core import EngineCore
from pegboard.testing.checkpoints import make_checkpoint

PROMPTS = [[5, 6, 7], [9] * 20, [11, 12] * 9, [100], [7, 8] * 25, [40, 41, 42]]


def greedy(max_tokens: int = 30) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, top_p=0.95, seed=seed, max_tokens=20, ignore_eos=True)


def answers(llm: Any) -> list[list[int]]:
    """Six prompts at once, greedily and with seeds."""
    params = [greedy()] * len(PROMPTS) + [seeded(i) for i in range(len(PROMPTS))]
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS * 2, params)]


def after_aborts(llm: Any) -> dict[str, list[int]]:
    """Of six requests 1, 2 and 3 are aborted on their way; the others' tokens."""
    engine, found = llm.engine, {}
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, greedy(25))
    for step in itertools.count():
        if not engine.has_unfinished_requests():
            return found
        for output in engine.step():
            if output.outputs[0].finish_reason == "length":
                found[output.request_id] = list(output.outputs[0].token_ids)
        if step in (3, 7, 8):
            engine.abort_request(str(step % 6))
    raise AssertionError


@pytest.fixture(scope="module", params=[5, 10])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("layers"), num_layers=request.param, num_heads=4, num_kv_heads=2)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[int]]:
    with LLM(str(folder), dtype="float32", kv_cache={"num_blocks": 400}, executor={"num_threads": 1}) as llm:
        return answers(llm)


@pytest.mark.parametrize(
    ("tp", "pp", "split"),
    [(1, 2, None), (1, 3, None), (1, 4, None), (2, 2, None), (1, 2, "last"), (1, 3, "first"), (4, 2, "last")],
)
def test_answers_are_those_of_one_rank(
    open_llm: Any, folder: Path, wanted: Any, caplog: Any, tp: int, pp: int, split: str | None
) -> None:
    num_layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    explicit = {"last": [1] * (pp - 1) + [num_layers - pp + 1], "first": [num_layers - pp + 1] + [1] * (pp - 1), None: None}[
        split
    ]
    caplog.set_level(logging.INFO)
    llm = open_llm(folder, tp, pp, executor={"pipeline_split": explicit} if explicit else {})
    ranges = llm.engine.collective_rpc("layer_range")
    held = [layer for rank in range(0, tp * pp, tp) for layer in range(*ranges[rank])]
    assert held == list(range(num_layers)), "no layer is missing or held twice"
    assert all(ranges[rank] == ranges[rank - rank % tp] for rank in range(tp * pp))
    sizes = [stop - start for start, stop in ranges[::tp]]
    assert sizes == explicit if explicit else max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes) or explicit
    assert f"(layers per stage: {', '.join(map(str, sizes))})" in caplog.text
    assert answers(llm) == wanted
    assert after_aborts(llm) == {str(i): wanted[i][:25] for i in (0, 4, 5)}


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"])
@pytest.mark.parametrize("tied", [True, False])
def test_other_architectures(open_llm: Any, tmp_path: Path, architecture: str, tied: bool) -> None:
    folder = make_checkpoint(tmp_path, architecture, num_layers=3, vocab_size=1001, tie_word_embeddings=tied)
    expected = answers(open_llm(folder))
    assert answers(open_llm(folder, 1, 3)) == expected
    assert answers(open_llm(folder, 2, 2)) == expected


def test_requests_that_arrive_together_keep_every_stage_busy(
    open_llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were all of them in one plan, only one step would be in flight."""
    depths: Counter[int] = Counter()
    result = EngineCore._result
    monkeypatch.setattr(EngineCore, "_result", lambda core, step: depths.update([len(core._in_flight) + 1]) or result(core, step))
    llm = open_llm(make_checkpoint(tmp_path, num_layers=3), 1, 3)
    llm.generate(PROMPTS, greedy(20))
    assert depths[3] > 0.8 * depths.total()


def test_the_head_counts_where_layers_are_spread(open_llm: Any, tmp_path: Path) -> None:
    """Each layer has 36,864 weights, the head of 5,000 ids 320,000: it counts as 4.3 layers."""
    folder = make_checkpoint(tmp_path, num_layers=6, vocab_size=5000, tokenizer_size=1000)
    llm = open_llm(folder, 1, 2)
    assert [tuple(each) for each in llm.engine.collective_rpc("layer_range")] == [(0, 5), (5, 6)]
    assert answers(llm) == answers(open_llm(folder))


def test_windows_that_differ_between_stages(open_llm: Any, tmp_path: Path) -> None:
    """A stage that has layers of one kind only keeps the block tables of both: a plan speaks of them to all."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0, "layer_types": kinds}
    folder = make_checkpoint(tmp_path, "Qwen2ForCausalLM", num_layers=4, config_overrides=window)
    llm = open_llm(folder, 1, 2)
    specs = llm.engine.collective_rpc("get_kv_cache_specs")
    assert [{spec.sliding_window for spec in rank.values()} for rank in specs] == [{9}, {None}]
    assert answers(llm) == answers(open_llm(folder))
    assert llm.stats().num_passed_blocks > 0


def test_every_stage_sizes_its_own_layers_and_the_fullest_decides(ranks: Any, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, num_layers=5, tokenizer=False)
    stages = ranks(folder, 1, 2, executor={"pipeline_split": (4, 1)})
    assert [len(specs) for specs in stages.specs] == [4, 1]
    block = next(iter(stages.specs[0].values())).block_bytes
    assert stages.measured.num_blocks == (16 << 20) // (4 * block)
    assert [layer for group in stages.measured.groups for layer in group.layers] == [
        f"model.layers.{i}.self_attn" for i in range(5)
    ]
    assert [set(worker.runner.cache.device_caches) for worker in stages.workers] == [set(specs) for specs in stages.specs]
    assert [worker.runner.sampler is None for worker in stages.workers] == [True, False]


def test_a_model_that_hands_on_nothing_is_told(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = ranks(make_checkpoint(tmp_path, tokenizer=False), 1, 2)
    model = stages.workers[0].runner.model
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *args: forward(*args)["hidden"])
    stages.driver.add("a", [1, 2, 3])
    with pytest.raises(Exception, match=r"must return the tensors \['hidden'\], not Tensor"):
        stages.driver.step({"a": 3})


def test_the_time_of_waiting_for_a_stage_is_told_apart(ranks: Any, tmp_path: Path) -> None:
    stages = ranks(make_checkpoint(tmp_path, tokenizer=False), 1, 2)
    stages.executor.collective_rpc("record_timings", (True,))
    stages.driver.add("a", [1, 2, 3])
    stages.driver.generate(5)
    first, last = stages.executor.collective_rpc("record_timings", (False,))
    assert first["steps"] == last["steps"] == 5
    assert last["receive"] > 0
    assert last["forward"] > 0
