"""Ranks that share each layer: what they generate together is what one rank generates, and each holds its heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.plan_driver import GREEDY, random_prompts
from pegboard.wire import SamplingParams
from pegboard_plugins.layers.sharing import Share, Span

HEADS = [(4, 2), (4, 1), (8, 4), (4, 4)]
LOGPROBS = SamplingParams(temperature=0.0, max_tokens=None, logprobs=5)


def generate(ranks: Any, count: int = 30, sampling: SamplingParams = LOGPROBS) -> dict[str, tuple[list[int], list[Any]]]:
    """By name of the prompt: tokens, and their log probabilities."""
    for name, prompt in random_prompts(3, 17, 40).items():
        ranks.driver.add(name, prompt, sampling)
    ranks.driver.generate(count, chunk=16)
    return {name: (request.output, request.logprobs) for name, request in ranks.driver.requests.items()}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert {name: tokens for name, (tokens, _) in found.items()} == {name: tokens for name, (tokens, _) in wanted.items()}
    for name, (_, entries) in wanted.items():
        for ours, theirs in zip(found[name][1], entries, strict=True):
            assert ours.token_ids[0] == theirs.token_ids[0]
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)


@pytest.mark.parametrize(("heads", "key_heads"), HEADS)
def test_tokens_and_logprobs_are_those_of_one_rank(ranks: Any, tmp_path: Path, heads: int, key_heads: int) -> None:
    folder = make_checkpoint(tmp_path, num_heads=heads, num_kv_heads=key_heads, tokenizer=False)
    one = ranks(folder)
    wanted = generate(one)
    for tp in (2, 4):
        several = ranks(folder, tp)
        assert_same(generate(several), wanted)
        own = max(1, key_heads // tp)
        for worker, specs in zip(several.workers, several.specs, strict=True):
            assert {spec.num_kv_heads for spec in specs.values()} == {own}
            assert {layer.num_heads for layer in worker.runner.model.attention_layers} == {heads // tp}
            assert {cache.shape[1:] for cache in worker.runner.cache.device_caches.values()} == {
                type(worker.runner.backends[0]).kv_cache_shape(1, 8, own, 64 // heads)[1:]
            }
        assert several.measured.num_blocks == one.measured.num_blocks * key_heads // own, "as many as fit, of what a rank stores"
        assert_equal_keys(several, heads, key_heads)


def assert_equal_keys(several: Any, heads: int, key_heads: int) -> None:
    """Ranks that share a key head store the same, and no others do."""
    tp = several.executor.world.size
    stored = [list(worker.runner.cache.device_caches.values()) for worker in several.workers]
    for a in range(tp):
        for b in range(a):
            same_head = a * key_heads // tp == b * key_heads // tp and key_heads < tp
            assert all(torch.equal(x, y) for x, y in zip(stored[a], stored[b], strict=True)) == same_head, (a, b)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("Qwen2ForCausalLM", {"tie_word_embeddings": True, "vocab_size": 1003}),
        ("Qwen3ForCausalLM", {"vocab_size": 1001, "config_overrides": {"attention_bias": True}}),
        ("LlamaForCausalLM", {"config_overrides": {"attention_bias": True, "mlp_bias": True}, "vocab_size": 1002}),
        ("MistralForCausalLM", {"config_overrides": {"sliding_window": 9}, "hidden_size": 50, "head_dim": 16}),
        ("Gemma2ForCausalLM", {"vocab_size": 1001, "tie_word_embeddings": True, "head_dim": 24}),
        ("Gemma3ForCausalLM", {"vocab_size": 1003, "hidden_size": 50, "head_dim": 16}),
    ],
)
def test_architectures_biases_norms_and_odd_sizes(ranks: Any, tmp_path: Path, architecture: str, options: Any) -> None:
    folder = make_checkpoint(tmp_path, architecture, num_heads=4, num_kv_heads=2, tokenizer=False, **options)
    wanted = generate(ranks(folder))
    for tp in (2, 4):
        assert_same(generate(ranks(folder, tp)), wanted)


@pytest.mark.parametrize("vocab_size", [1000, 1001, 7, 5])
def test_any_vocabulary(ranks: Any, tmp_path: Path, vocab_size: int) -> None:
    """Of 5 ids over 4 ranks, the last one has none."""
    folder = make_checkpoint(tmp_path, num_heads=4, vocab_size=vocab_size, tie_word_embeddings=True, tokenizer=False)

    def run(tp: int) -> Any:
        several = ranks(folder, tp)
        for name, prompt in random_prompts(3, 20, vocab_size=vocab_size).items():
            several.driver.add(name, prompt, GREEDY)
            several.driver.add(f"{name} drawn", prompt, SamplingParams(temperature=1.5, top_p=0.9, seed=1, max_tokens=None))
        return several.driver.generate(20)

    wanted = run(1)
    assert run(2) == wanted
    assert run(4) == wanted
    assert all(token < vocab_size for tokens in wanted.values() for token in tokens)


def test_narrow_types_generate_too(ranks: Any, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, num_heads=4, dtype="bfloat16", tokenizer=False)
    several = ranks(folder, 2, dtype="bfloat16")
    found = generate(several)
    assert all(len(tokens) == 30 for tokens, _ in found.values())
    exact = generate(ranks(folder), sampling=SamplingParams(temperature=0.0, max_tokens=None, logprobs=20))
    for name, (tokens, _) in found.items():
        best = exact[name][1][0]
        assert tokens[0] in best.token_ids[:4], "near the exact best"


def test_shares() -> None:
    assert [Share(rank, 3).evenly(9) for rank in range(3)] == [Span(0, 3), Span(3, 3), Span(6, 3)]
    assert [Share(rank, 4).key_heads(2) for rank in range(4)] == [Span(0, 1), Span(0, 1), Span(1, 1), Span(1, 1)]
    assert [Share(rank, 4).up_to(5) for rank in range(4)] == [Span(0, 2), Span(2, 2), Span(4, 1), Span(5, 0)]
    assert Share(1, 4).padded(5) == 2
    assert Span(2, 3).times(8) == Span(16, 24)
    with pytest.raises(ValueError, match="7 cannot be shared evenly by 2 ranks"):
        Share(0, 2).evenly(7)
    with pytest.raises(ValueError, match="3 key heads cannot be shared by 4 ranks"):
        Share(0, 4).key_heads(3)
