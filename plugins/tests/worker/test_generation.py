"""The whole worker on checkpoints, driven by hand-made plans through the uniproc executor, against transformers in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.contracts.executor import WorkerError
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.plan_driver import GREEDY, random_prompts
from pegboard.wire import SamplingParams

CLEAR = 1e-3
"""Logits closer than this may be ordered either way."""
Engine = Any
"""The class of that name in ``conftest``."""


@torch.no_grad()
def assert_greedy(folder: Path, prompts: dict[str, list[int]], found: dict[str, list[int]]) -> None:
    """Each token is transformers' choice after the tokens before it, or as good within ``CLEAR``; most are clear."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    clear = total = 0
    for name, prompt in prompts.items():
        logits = model(torch.tensor([prompt + found[name]])).logits[0]
        for i, token in enumerate(found[name]):
            row = logits[len(prompt) - 1 + i]
            best = row.topk(2).values
            assert row[token] >= best[0] - CLEAR, f"{name}, token {i}: {token} instead of {int(row.argmax())}"
            clear += int(best[0] - best[1] > CLEAR)
            total += 1
    assert clear > total * 2 / 3


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"],
)
def test_greedy_tokens_equal_transformers(architecture: str, tmp_path: Path, engine: Callable[..., Engine]) -> None:
    make_checkpoint(tmp_path, architecture)
    prompts = random_prompts(1, 8, 17, 60)
    assert_greedy(tmp_path, prompts, engine(str(tmp_path)).generate(prompts, 20))


def test_a_sliding_window_equals_transformers(tmp_path: Path, engine: Callable[..., Engine]) -> None:
    make_checkpoint(tmp_path, "MistralForCausalLM", config_overrides={"sliding_window": 12})
    prompts = random_prompts(5, 40)
    assert_greedy(tmp_path, prompts, engine(str(tmp_path)).generate(prompts, 20, chunk=7))


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, seed=5, max_tokens=None)], ids=["greedy", "seeded"])
def test_chunks_neighbours_and_preemption_change_nothing(
    sampling: SamplingParams, tmp_path: Path, engine: Callable[..., Engine]
) -> None:
    make_checkpoint(tmp_path)
    prompts = random_prompts(3, 33, 64, 7)
    machine = engine(str(tmp_path))
    alone = {name: machine.generate({name: prompt}, 12, sampling=sampling)[name] for name, prompt in prompts.items()}
    for chunk in (1, 5, 8, 16, 1 << 30):
        assert machine.generate(prompts, 12, chunk, sampling) == alone
    driver = machine.driver
    for name, prompt in prompts.items():
        driver.add(name, prompt, sampling)
    driver.generate(6, chunk=16)
    victim = next(iter(prompts))
    driver.preempt(victim)
    assert driver.generate(12, chunk=16) == alone


def test_dynamic_rope_gets_prompt_lengths(tmp_path: Path, engine: Callable[..., Engine]) -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    overrides = {"max_position_embeddings": 32, "rope_parameters": scaling, "rope_theta": ...}
    make_checkpoint(tmp_path, config_overrides=overrides)
    prompts = random_prompts(50, 20)
    machine = engine(str(tmp_path), max_model_len=100)
    whole = machine.generate(prompts, 3)
    assert machine.generate(prompts, 3, chunk=9) == whole


def test_logprobs_equal_transformers(tmp_path: Path, engine: Callable[..., Engine]) -> None:
    from transformers import AutoModelForCausalLM

    make_checkpoint(tmp_path)
    prompt = random_prompts(9)["p0-9"]
    machine = engine(str(tmp_path))
    machine.driver.add("a", prompt, SamplingParams(temperature=1.5, seed=3, logprobs=5))
    machine.driver.step({"a": 9})
    assert machine.driver.last_output is not None
    entry = machine.driver.last_output.logprobs[0][0]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    assert torch.allclose(torch.tensor(entry.logprobs), expected[entry.token_ids], atol=1e-3)
    assert entry.token_ids[1:] == [i for i in expected.topk(5).indices.tolist() if i != entry.token_ids[0]]
    assert entry.rank == 1 + int((expected > expected[entry.token_ids[0]]).sum())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_precisions_generate(dtype: str, tmp_path: Path, engine: Callable[..., Engine]) -> None:
    make_checkpoint(tmp_path, dtype=dtype)
    prompts = random_prompts(9, 20)
    machine = engine(str(tmp_path), dtype=dtype)
    found = machine.generate(prompts, 8, chunk=6)
    assert {name: len(ids) for name, ids in found.items()} == dict.fromkeys(prompts, 8)
    assert machine.executor.get_kv_cache_specs()[0].popitem()[1].dtype == dtype


def test_padded_rows_of_the_vocabulary_are_never_chosen(tmp_path: Path, engine: Callable[..., Engine]) -> None:
    def lift(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][1000:] = 50 * tensors["lm_head.weight"][:100]

    make_checkpoint(tmp_path, vocab_size=1100, tokenizer_size=1000, edit=lift)
    machine = engine(str(tmp_path))
    prompts = random_prompts(9, 14, 22)
    assert max(max(ids) for ids in machine.generate(prompts, 10).values()) >= 1000
    machine.executor.collective_rpc("set_vocab_limit", (1000,))
    for sampling in (GREEDY, SamplingParams(temperature=2.0, top_k=1000, seed=1, max_tokens=None)):
        assert max(max(ids) for ids in machine.generate(prompts, 10, sampling=sampling).values()) < 1000


def test_weights_that_make_no_numbers_fail_rows_and_not_the_worker(tmp_path: Path, engine: Callable[..., Engine]) -> None:
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][7] = float("nan")

    make_checkpoint(tmp_path, edit=poison)
    machine = engine(str(tmp_path))
    machine.driver.add("bad", [1, 7, 2])
    machine.driver.add("good", [1, 8, 2])
    assert list(machine.driver.step({"bad": 3, "good": 3})) == ["good"]
    assert machine.driver.last_output is not None
    assert "not finite" in machine.driver.last_output.errors[0]


def test_memory_phase_counts_the_weights(tmp_path: Path, engine: Callable[..., Engine]) -> None:
    make_checkpoint(tmp_path, hidden_size=256, num_layers=4, vocab_size=4000, tokenizer=False)
    stored = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    report = engine(str(tmp_path)).report
    assert stored * 0.95 < report.weights < stored * 1.6, "packed copies may come on top"
    assert report.available == 16 << 20


def test_broken_weights_are_told(tmp_path: Path, engine: Callable[..., Engine]) -> None:
    make_checkpoint(tmp_path)
    file = next(tmp_path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(WorkerError, match=r"WeightsError.*safetensors"):
        engine(str(tmp_path))


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(engine: Callable[..., Engine]) -> None:
    machine = engine("smollm2", dtype="auto", num_blocks=40)
    tokenizer = machine.composition.create("tokenizer")
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    assert "Paris" in tokenizer.decode(machine.generate({"a": prompt}, 8, chunk=16)["a"])
