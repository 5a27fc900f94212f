"""Layers with sliding windows beside layers without: past several windows the engine answers as transformers does, holds no more
than the windows see, and gives the rest back."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard.plugins import hookimpl
from pegboard.plugins.provider import SchedulerProvider
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.thread_executor import THREADS, ThreadRanks
from pegboard.wire.kv_cache import window_blocks

BLOCK, WINDOW = 4, 10
MODELS: dict[str, dict[str, Any]] = {
    "alternating": {
        "architecture": "Qwen3ForCausalLM",
        "num_layers": 4,
        "config_overrides": {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    },
    "three of four": {
        "architecture": "Qwen2ForCausalLM",
        "num_layers": 4,
        "config_overrides": {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
    },
    "all": {"architecture": "MistralForCausalLM", "config_overrides": {"sliding_window": WINDOW}},
    "soft cap": {"architecture": "Gemma2ForCausalLM", "config_overrides": {"sliding_window": WINDOW}},
    "two ropes": {"architecture": "Gemma3ForCausalLM", "num_layers": 4, "config_overrides": {"sliding_window": WINDOW}},
}
NUM_WINDOWED = {"alternating": 1, "three of four": 3, "all": 1, "soft cap": 1, "two ropes": 1}
"""Groups of layers with a window; all but "all" have one without as well."""
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp("windows"), max_position_embeddings=512, **MODELS[name])
        return made[name]

    return folder


@pytest.fixture
def open_windows(folder_of: Folders, open_llm: Any) -> Callable[..., Any]:
    """An engine for the checkpoint with this name; ``num_blocks``, ``chunk`` and ``rows`` by name, other settings as they are."""

    def open_(name: str, num_blocks: int = 400, chunk: int = 512, rows: int = 16, **settings: Any) -> Any:
        kv_cache = {"block_size": BLOCK, "num_blocks": num_blocks, **settings.pop("kv_cache", {})}
        scheduler = {"name": settings.pop("scheduler", "auto"), "max_num_batched_tokens": chunk, "max_num_seqs": rows}
        return open_llm(folder_of(name), kv_cache=kv_cache, scheduler=scheduler, **settings)

    return open_


def spoken(llm: Any, prompts: Any, params: Any) -> list[list[int]]:
    return [list(answer.token_ids) for output in llm.generate(prompts, params) for answer in output.outputs]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("chunk", [16, 512])
def test_tokens_are_those_of_transformers_past_several_windows(
    model: str, impl: str, chunk: int, open_windows: Any, folder_of: Folders, greedy: Any, random_prompts: Any, reference_of: Any
) -> None:
    prompts = random_prompts([1, 9, 10, 11, 64, 97], seed=3)
    llm = open_windows(model, chunk=chunk, model_impl=impl)
    reference = reference_of(folder_of(model))
    for prompt, output in zip(prompts, spoken(llm, prompts, greedy(50)), strict=True):
        assert len(output) == 50
        reference.check_greedy(prompt, output)
    stats = llm.stats()
    assert stats.kv_usage == 0
    past = sum((len(prompt) + 50 - 2 * WINDOW) // BLOCK for prompt in prompts)
    assert stats.num_passed_blocks > past * NUM_WINDOWED[model], "windows have passed far more tokens than they see"


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("model", ["alternating", "three of four", "all"])
def test_a_request_holds_what_windows_see_and_no_more(
    model: str, chunk: int, open_windows: Any, greedy: Any, random_prompts: Any, streams: Any
) -> None:
    """Counted in every step, with a prompt of nine windows."""
    llm = open_windows(model, chunk=chunk)
    [prompt] = random_prompts([93])
    running, held = streams(llm.engine), []
    running.add("r", prompt, greedy(40))
    while running.engine.has_unfinished_requests():
        running.step()
        held.append(round(llm.stats().kv_usage * 400))
    whole = 0 if model == "all" else math.ceil((93 + 40) / BLOCK)
    assert max(held) <= whole + NUM_WINDOWED[model] * window_blocks(WINDOW, BLOCK, chunk)
    last = [count - whole for count in held[-20:-1]]
    assert max(last) <= NUM_WINDOWED[model] * window_blocks(WINDOW, BLOCK, 1), "one token at a time sees one window"
    assert llm.stats().num_passed_blocks >= (133 // BLOCK - 5) * NUM_WINDOWED[model]


def test_windows_make_room_for_longer_requests(
    open_windows: Any, greedy: Any, random_prompts: Any, folder_of: Any, reference_of: Any
) -> None:
    """40 blocks for 4 groups are 10 each, but three of them never hold more than 7."""
    llm = open_windows("three of four", num_blocks=40, chunk=8)
    bound = window_blocks(WINDOW, BLOCK, 8)
    tokens = (40 - 3 * bound) * BLOCK
    assert llm.engine.info.kv_tokens == tokens > 40 // 4 * BLOCK
    [prompt] = random_prompts([tokens - 20])
    [output] = llm.generate([prompt], greedy(None))
    assert len(output.outputs[0].token_ids) == 21, "it ends where the blocks do"
    reference_of(folder_of("three of four")).check_greedy(prompt, output.outputs[0].token_ids)
    with pytest.raises(ValueError, match=f"KV cache holds {tokens}"):
        llm.generate(random_prompts([tokens + 1]), greedy(1))
    llm = open_windows("all", num_blocks=bound, chunk=8)
    assert llm.engine.info.max_tokens == 512, "windows alone never need more"
    assert len(llm.generate(random_prompts([300]), greedy(100))[0].outputs[0].token_ids) == 100


@pytest.mark.parametrize("model", ["alternating", "all", "two ropes"])
def test_prefixes_are_found_again_behind_windows(
    model: str, open_windows: Any, folder_of: Folders, greedy: Any, random_prompts: Any, reference_of: Any
) -> None:
    llm, reference = open_windows(model), reference_of(folder_of(model))
    [prompt, other] = random_prompts([70, 30], seed=5)
    [first] = spoken(llm, [prompt], greedy(30))
    followed = [*prompt, *first[:20], *other]
    for turn, cached in ((prompt, 68), (followed, 88), (followed, 116)):
        [output] = llm.generate([turn], greedy(20))
        assert output.num_cached_tokens == cached
        reference.check_greedy(turn, output.outputs[0].token_ids)


def test_a_prefix_whose_window_was_evicted_is_shorter(
    open_windows: Any, folder_of: Folders, greedy: Any, random_prompts: Any, reference_of: Any
) -> None:
    llm, reference = open_windows("alternating", num_blocks=100), reference_of(folder_of("alternating"))
    [prompt, *others] = random_prompts([60, 60, 61, 62, 63], seed=6)
    found = []
    for turn in (prompt, others[0], prompt, *others, prompt):
        [output] = llm.generate([turn], greedy(20))
        reference.check_greedy(turn, output.outputs[0].token_ids)
        found.append(output.num_cached_tokens)
    assert found[2] == 56
    assert found[-1] == 0


@pytest.mark.parametrize("allocator", ["paged", "prefix"])
@pytest.mark.parametrize("model", ["three of four", "alternating"])
def test_preempted_requests_come_back(
    model: str, allocator: str, open_windows: Any, folder_of: Folders, greedy: Any, random_prompts: Any, reference_of: Any
) -> None:
    prompts = random_prompts([50] * 8, seed=7)
    num_blocks = {"three of four": 120, "alternating": 60}[model]
    llm = open_windows(model, num_blocks=num_blocks, chunk=16, rows=8, kv_cache={"allocator": allocator})
    reference = reference_of(folder_of(model))
    for prompt, output in zip(prompts, spoken(llm, prompts, greedy(60)), strict=True):
        assert len(output) == 60
        reference.check_greedy(prompt, output)
    assert llm.stats().num_preemptions > 0, "the pool is too large for this test"
    assert llm.stats().kv_usage == 0


def test_answers_to_one_prompt(open_windows: Any, greedy: Any, random_prompts: Any) -> None:
    """Some start beside the first one, some when its window has left the prompt behind."""
    prompts = random_prompts([37, 64], seed=8)
    params = [greedy(40, temperature=1.0, seed=i, n=5) for i in range(2)]
    alone = [greedy(40, temperature=1.0, seed=i, n=5) for i in range(2)]
    wanted = spoken(open_windows("alternating", rows=16), prompts, alone)
    for rows in (2, 3):
        assert spoken(open_windows("alternating", rows=rows), prompts, params) == wanted


@pytest.mark.parametrize("model", ["three of four", "two ropes"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_share_windows(
    model: str, tp: int, pp: int, open_windows: Any, folder_of: Folders, greedy: Any, random_prompts: Any, reference_of: Any
) -> None:
    prompts = random_prompts([1, 11, 64, 97, 40], seed=9)
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    llm = open_windows(model, chunk=24, rows=4, num_blocks=200, executor={**THREADS, **sizes}, plugins={"threads": ThreadRanks()})
    reference = reference_of(folder_of(model))
    for prompt, output in zip(prompts, spoken(llm, prompts, greedy(50)), strict=True):
        assert len(output) == 50
        reference.check_greedy(prompt, output)
    assert llm.stats().num_passed_blocks > 0


class WithoutWindows:
    """Offers the standard scheduler as one that does not know windows."""

    @hookimpl
    def schedulers(self) -> Iterator[SchedulerProvider]:
        yield SchedulerProvider(name="plain", target="pegboard_plugins.scheduling.scheduler:DefaultScheduler")


def test_a_scheduler_that_knows_no_windows_keeps_everything(
    open_windows: Any, folder_of: Folders, greedy: Any, random_prompts: Any, reference_of: Any
) -> None:
    llm = open_windows(
        "three of four", num_blocks=50, plugins={"plain": WithoutWindows(), "enabled": ["plain"]}, scheduler="plain"
    )
    assert llm.engine.info.kv_tokens == 50 * BLOCK, "one block table for all layers"
    [prompt] = random_prompts([90])
    [output] = spoken(llm, [prompt], greedy(40))
    reference_of(folder_of("three of four")).check_greedy(prompt, output)
    assert llm.stats().num_passed_blocks == 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pegboard_executor_mp") is None, reason="pegboard-executor-mp is not installed")
def test_processes_share_windows(
    open_windows: Any, folder_of: Folders, greedy: Any, random_prompts: Any, reference_of: Any
) -> None:
    prompts = random_prompts([11, 64, 97], seed=10)
    llm = open_windows("two ropes", chunk=24, rows=4, executor={"tensor_parallel_size": 2, "pipeline_parallel_size": 2})
    reference = reference_of(folder_of("two ropes"))
    for prompt, output in zip(prompts, spoken(llm, prompts, greedy(50)), strict=True):
        reference.check_greedy(prompt, output)
    assert llm.stats().num_passed_blocks > 30
