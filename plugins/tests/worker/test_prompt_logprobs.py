"""Log probabilities of prompts on a checkpoint, against transformers in float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.plan_driver import GREEDY, DrivenRequest, random_prompts
from pegboard.wire import Logprobs, SamplingParams
from pegboard_plugins.worker.prompt_logprobs import POSITIONS_AT_ONCE

Engine = Any
"""The class of that name in ``conftest``."""
CLOSE = 1e-3


def wanting(count: int | None, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=None, prompt_logprobs=count, **changes)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Callable[[list[int]], torch.Tensor]:
    """Log probabilities [len(prompt) - 1, vocab] of the tokens after each but the last."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.no_grad()
    def look(prompt: list[int]) -> torch.Tensor:
        return model(torch.tensor([prompt])).logits[0, :-1].double().log_softmax(-1)

    return look


def assert_equal(request: DrivenRequest, expected: torch.Tensor, count: int, first: int = 1) -> None:
    """Positions from ``first`` on, each with ``count`` alternatives in falling order."""
    assert sorted(request.prompt_logprobs) == list(range(first, request.prompt_len))
    for position, entry in request.prompt_logprobs.items():
        row, token = expected[position - 1], request.token_ids[position]
        assert entry.token_ids[0] == token
        assert torch.allclose(torch.tensor(entry.logprobs).double(), row[entry.token_ids], atol=CLOSE)
        # ids that lie closer than CLOSE may be counted either way
        assert int((row > row[token] + CLOSE).sum()) < entry.rank <= 1 + int((row > row[token] - CLOSE).sum())
        best = row.topk(max(count, 1)).values
        assert len(set(entry.token_ids)) == len(entry.token_ids) in (count, count + 1)
        others = torch.tensor(entry.logprobs[1:]).double()
        assert (others[:-1] >= others[1:]).all()
        assert not len(others) or others[-1] >= best[-1] - CLOSE


@pytest.mark.parametrize("chunk", [1 << 30, 1, 7, 16, 100])
def test_values_equal_transformers(
    chunk: int, checkpoint: Path, engine: Callable[..., Engine], reference: Callable[[list[int]], torch.Tensor]
) -> None:
    driver = engine(str(checkpoint)).driver
    prompts = random_prompts(1, 2, 40, 150, 16)
    counts = dict(zip(prompts, (3, 0, 5, 20, 1), strict=True))
    for name, prompt in prompts.items():
        driver.add(name, prompt, wanting(counts[name]))
    driver.add("plain", prompts["p2-40"])
    found = driver.generate(3, chunk)
    assert found["plain"] == found["p2-40"]
    assert not driver.requests["plain"].prompt_logprobs
    for name, prompt in prompts.items():
        assert_equal(driver.requests[name], reference(prompt), counts[name])


@pytest.mark.parametrize("blocks", [1, 4])
def test_a_prompt_that_is_cached_in_part_reports_what_is_computed(
    blocks: int, checkpoint: Path, engine: Callable[..., Engine], reference: Callable[[list[int]], torch.Tensor]
) -> None:
    driver = engine(str(checkpoint)).driver
    prompt = random_prompts(45)["p0-45"]
    driver.add("first", prompt)
    driver.generate(1)
    driver.add("second", prompt, wanting(2))
    driver.share_prefix("second", "first", blocks)
    driver.step({"second": 3, "first": 1})
    driver.generate(2)
    assert_equal(driver.requests["second"], reference(prompt), 2, first=8 * blocks + 1)


@pytest.mark.parametrize("computed", [0, 5, 20, 33])
def test_a_request_that_comes_back_reports_its_prompt_and_no_output(
    computed: int, checkpoint: Path, engine: Callable[..., Engine], reference: Callable[[list[int]], torch.Tensor]
) -> None:
    driver = engine(str(checkpoint)).driver
    prompt = random_prompts(33)["p0-33"]
    driver.add("a", prompt, wanting(4))
    if computed == 33:
        driver.generate(6)
    elif computed:
        driver.step({"a": computed})
    early = dict(driver.requests["a"].prompt_logprobs)
    assert len(early) == min(computed, 32)
    driver.preempt("a")
    driver.requests["a"].prompt_logprobs.clear()
    driver.generate(9, chunk=10)
    assert_equal(driver.requests["a"], reference(prompt), 4)
    for position, entry in early.items():
        again = driver.requests["a"].prompt_logprobs[position]
        assert (again.token_ids, again.rank) == (entry.token_ids, entry.rank)
        assert again.logprobs == pytest.approx(entry.logprobs, abs=1e-4)


def test_entries_agree_with_those_of_the_output(checkpoint: Path, engine: Callable[..., Engine]) -> None:
    """What a request says of its output, another says of the same tokens as a prompt."""
    driver = engine(str(checkpoint)).driver
    prompt = random_prompts(12)["p0-12"]
    driver.add("a", prompt, SamplingParams(temperature=1.0, seed=2, max_tokens=None, logprobs=4))
    output = driver.generate(10)["a"]
    driver.add("b", prompt + output, wanting(4))
    driver.generate(10)
    for position, entry in enumerate(driver.requests["a"].logprobs, len(prompt)):
        other = driver.requests["b"].prompt_logprobs[position]
        assert (other.token_ids, other.rank) == (entry.token_ids, entry.rank)
        assert other.logprobs == pytest.approx(entry.logprobs, abs=1e-4)


def test_logits_are_computed_in_portions_and_only_where_wanted(
    checkpoint: Path, engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = engine(str(checkpoint))
    model, sizes = machine.worker.runner.model, []
    compute = model.compute_logits

    def spy(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return compute(hidden)

    monkeypatch.setattr(model, "compute_logits", spy)
    driver = machine.driver
    driver.add("plain", list(range(150)))
    driver.step({"plain": 150})
    assert sizes == [1]
    driver.add("wanting", list(range(150)), wanting(1))
    driver.add("short", list(range(10)), wanting(1))
    driver.step({"wanting": 140, "plain": 1, "short": 10})
    assert sizes[1:] == [2, POSITIONS_AT_ONCE, POSITIONS_AT_ONCE, 149 - 2 * POSITIONS_AT_ONCE]
    driver.step({"wanting": 10, "short": 1})
    assert sizes[5:] == [2, 9]
    driver.generate(4)
    assert max(sizes[7:]) <= 3, "nothing is left to report"


def test_padded_rows_of_the_vocabulary_have_no_share(tmp_path: Path, engine: Callable[..., Engine]) -> None:
    def lift(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][1000:] = 50 * tensors["lm_head.weight"][:100]

    make_checkpoint(tmp_path, vocab_size=1100, tokenizer_size=1000, edit=lift)
    machine = engine(str(tmp_path))
    machine.executor.collective_rpc("set_vocab_limit", (1000,))
    machine.driver.add("a", [1, 2, 1050, 3], wanting(20))
    machine.driver.step({"a": 4})
    entries: dict[int, Logprobs] = machine.driver.requests["a"].prompt_logprobs
    assert max(max(entry.token_ids[1:]) for entry in entries.values()) < 1000
    assert sum(math.exp(p) for p in entries[1].logprobs[1:]) > 0.1
    assert (entries[2].logprobs[0], entries[2].rank) == (-math.inf, 1001)


def test_values_that_are_no_numbers_fail_the_row(tmp_path: Path, engine: Callable[..., Engine]) -> None:
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][7] = float("nan")

    make_checkpoint(tmp_path, edit=poison)
    driver = engine(str(tmp_path)).driver
    driver.add("bad", [1, 2, 7, 3, 4], wanting(1, logprobs=1))
    driver.add("good", [1, 8, 2], wanting(1))
    assert driver.step({"bad": 2, "good": 3}).keys() == {"good"}
    assert sorted(driver.requests["bad"].prompt_logprobs) == [1, 2]
    driver.step({"bad": 2, "good": 1})
    assert list(driver.last_output.errors) == [0], "told as soon as it is seen, in a chunk that samples nothing"
    assert "not finite" in driver.last_output.errors[0]
    driver.finish("bad")
    assert len(driver.generate(4)["good"]) == 4


def test_greedy_neighbours_are_not_disturbed(checkpoint: Path, engine: Callable[..., Engine]) -> None:
    machine = engine(str(checkpoint))
    prompts = random_prompts(30, 70)
    alone = machine.generate(prompts, 8)
    driver = machine.driver
    for name, prompt in prompts.items():
        driver.add(name, prompt, GREEDY)
        driver.add(f"{name}+", prompt, wanting(2))
    assert driver.generate(8, chunk=11) == {**alone, **{f"{name}+": ids for name, ids in alone.items()}}
