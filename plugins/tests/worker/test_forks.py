"""Forked rows: what the step computes for them, what is refused, and that each equals a request of its own on a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.contracts.sampler import SamplingBatch
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.plan_driver import GREEDY, PlanDriver, random_prompts
from pegboard.wire import NewRequestData, SamplingParams, SchedulerOutput
from pegboard_plugins.worker.input_batch import InputBatch
from pegboard_plugins.worker.step_inputs import StepBuilder, StepInputs

Engine = Any
"""The class of that name in ``conftest``."""


# -- inputs of a step --------------------------------------------------------------------------------------------------


def row(slot: int, tokens: list[int], count: int, *, samples: bool = True, known: int | None = None) -> dict[str, Any]:
    """``count`` more tokens, up to the end of ``tokens``."""
    return {"slot": slot, "tokens": tokens, "count": count, "samples": int(samples), "known": known or len(tokens)}


def plan_of(rows: list[dict[str, Any]], forks: dict[int, int]) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=5,
        slots=[r["slot"] for r in rows],
        num_scheduled_tokens=[r["count"] for r in rows],
        num_computed_tokens=[r["known"] - r["count"] for r in rows],
        num_to_sample=[r["samples"] for r in rows],
        new_requests=[
            NewRequestData(
                slot=r["slot"],
                request_id=str(r["slot"]),
                token_ids=r["tokens"],
                prompt_len=len(r["tokens"]),
                sampling=SamplingParams(),
                stop_token_ids=[],
                block_ids=[[10 * r["slot"] + i for i in range(1, 5)]],
            )
            for r in rows
        ],
        fork_slots=list(forks),
        fork_sources=list(forks.values()),
    )


def build(plan: SchedulerOutput, change: Callable[[SchedulerOutput], None] = lambda plan: None) -> StepInputs:
    batch = InputBatch(num_slots=8, max_model_len=16, block_size=4, vocab_limit=1000, seed=0)
    batch.enter(plan)
    change(plan)
    return StepBuilder(batch, 64, torch.device("cpu"), with_prompt_lens=True).build(plan)


def test_rows_without_tokens_are_left_out_of_the_forward() -> None:
    rows = [row(4, [1, 2, 3], 0), row(0, [5, 6], 1, samples=False, known=1), row(1, [1, 2, 3], 2), row(7, [9], 0), row(3, [9], 1)]
    inputs = build(plan_of(rows, {4: 1, 7: 3}))
    assert inputs.input_ids.tolist() == [5, 2, 3, 9]
    assert inputs.positions.tolist() == [0, 1, 2, 0]
    assert inputs.prompt_lens is not None
    assert inputs.prompt_lens.tolist() == [2, 3, 3, 1]
    assert inputs.attention[0].num_rows == 3
    assert inputs.attention[0].query_start_loc.tolist() == [0, 1, 3, 4]
    assert inputs.attention[0].seq_lens.tolist() == [1, 3, 1]
    assert inputs.attention[0].block_table[:, 0].tolist() == [1, 11, 31]
    assert inputs.sample_rows.tolist() == [0, 2, 3, 4]
    assert inputs.sample_slots.tolist() == [4, 1, 7, 3]
    assert inputs.sample_lengths.tolist() == [3, 3, 1, 1]
    assert inputs.sample_index is not None
    assert inputs.logits_index is not None
    assert inputs.sample_index.tolist() == [2, 3]
    assert inputs.logits_index.tolist() == [0, 0, 1, 1]


def test_a_source_of_one_token_and_its_forks() -> None:
    inputs = build(plan_of([row(4, [1], 0), row(0, [1], 1), row(5, [1], 0)], {4: 0, 5: 4}))
    assert inputs.sample_index is None, "the step's only token"
    assert inputs.logits_index is not None
    assert inputs.logits_index.tolist() == [0, 0, 0]


SOURCE, FORK = row(0, [1, 2, 3], 3), row(1, [1, 2, 3], 0)


@pytest.mark.parametrize(
    ("rows", "forks", "message"),
    [
        ([SOURCE, FORK], {}, "schedules no token of slot 1, which is not forked"),
        ([SOURCE, FORK, row(2, [1, 2], 0)], {1: 0}, "schedules no token of slot 2"),
        ([SOURCE, FORK], {1: 6}, "forks slot 1 from slot 6, but slot 6 is not in the plan"),
        ([SOURCE], {1: 0}, "forks slot 1 from slot 0, but slot 1 is not in the plan"),
        ([row(0, [1, 2, 3], 2, samples=False, known=2), FORK], {1: 0}, "slot 0 samples 0 tokens instead of 1"),
        ([row(0, [1, 2, 3], 2, known=2), FORK], {1: 0}, "slot 0 reaches token 2, and its prompt ends at 3"),
        ([SOURCE, row(1, [1, 2, 3], 0, samples=False)], {1: 0}, "slot 1 samples 0 tokens instead of 1"),
        ([SOURCE, row(1, [1, 2, 3], 1)], {1: 0}, "slot 1 schedules 1 tokens of its own"),
        ([SOURCE, row(1, [1, 2, 3], 0, known=2)], {1: 0}, "slot 1 counts 2 of its 3 prompt tokens as computed"),
        ([SOURCE, row(1, [1, 2], 0)], {1: 0}, "their prompts differ"),
        ([SOURCE, row(1, [1, 2, 4], 0)], {1: 0}, "their prompts differ"),
        ([FORK], {1: 1}, "forks slot 1 from a row that is forked from it"),
        ([FORK, row(2, [1, 2, 3], 0)], {1: 2, 2: 1}, "forks slot 1 from a row that is forked from it"),
    ],
)
def test_forks_that_nothing_could_serve_are_refused(rows: list[dict[str, Any]], forks: dict[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"step 5 {message}" if message.startswith(("forks", "sched")) else message):
        build(plan_of(rows, forks))


def test_a_fork_enters_in_its_step() -> None:
    def forget(plan: SchedulerOutput) -> None:
        plan.new_requests = plan.new_requests[:1]

    with pytest.raises(ValueError, match="slot 1 does not enter in this step"):
        build(plan_of([SOURCE, FORK], {1: 0}), forget)


def test_a_source_that_has_output_already_is_refused() -> None:
    def resumed(plan: SchedulerOutput) -> None:
        plan.num_scheduled_tokens[0], plan.num_computed_tokens[0] = 3, 0

    plan = plan_of([row(0, [1, 2, 3], 3), row(1, [1, 2], 0)], {1: 0})
    plan.new_requests[0].prompt_len = 2
    with pytest.raises(ValueError, match="slot 0 reaches token 3, and its prompt ends at 2"):
        build(plan, resumed)


# -- a checkpoint ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("forks"))


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=None)


class Spy:
    """Notes how many rows the model makes logits of, how many attention sees, and what the sampler gets."""

    def __init__(self, machine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hidden: list[int] = []
        self.attended: list[int] = []
        self.logits: list[torch.Tensor] = []
        runner = machine.worker.runner
        [backend] = runner.backends
        compute, plan, sample = runner.model.compute_logits, backend.build_metadata, runner.sampler.sample

        def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
            self.hidden.append(len(hidden))
            return compute(hidden)

        def build_metadata(common: Any) -> Any:
            self.attended.append(common.num_rows)
            return plan(common)

        def look(logits: torch.Tensor, batch: SamplingBatch) -> Any:
            self.logits.append(logits.clone())
            return sample(logits, batch)

        monkeypatch.setattr(runner.model, "compute_logits", compute_logits)
        monkeypatch.setattr(backend, "build_metadata", build_metadata)
        monkeypatch.setattr(runner.sampler, "sample", look)


LENGTHS = {"one token": 1, "a full block": 8, "full blocks": 24, "a rest": 21, "nearly full": 31, "just over": 17}
"""Blocks hold 8 tokens."""


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_each_fork_equals_a_request_of_its_own(length: int, checkpoint: Path, engine: Callable[..., Engine]) -> None:
    """Tokens of 20 steps, the first from the logits of the prompt, the others from its own KV blocks."""
    driver: PlanDriver = engine(str(checkpoint)).driver
    [prompt] = random_prompts(length).values()
    alone = {}
    for i in range(4):
        driver.add(str(i), prompt, seeded(i))
        alone[str(i)] = driver.generate(20)[str(i)]
        driver.finish(str(i))
    assert len({tuple(output) for output in alone.values()}) == 4
    driver.add("0", prompt, seeded(0))
    for i in range(1, 4):
        driver.fork(str(i), "0", seeded(i))
    assert driver.generate(20) == alone


@pytest.mark.parametrize("chunk", [5, 8, 1 << 30])
def test_several_groups_among_other_requests(chunk: int, checkpoint: Path, engine: Callable[..., Engine]) -> None:
    driver: PlanDriver = engine(str(checkpoint)).driver
    prompts = dict(zip("abcd", random_prompts(1, 16, 21, 13).values(), strict=True))
    members = {"a0": 0, "a1": 1, "b0": 0, "b1": 1, "b2": 2, "c0": 0, "c1": 1, "d0": 7}
    alone = {}
    for name, seed in members.items():
        driver.add(name, prompts[name[0]], seeded(seed))
        alone[name] = driver.generate(20)[name]
        driver.finish(name)
    for name, seed in members.items():
        if name[1] == "0":
            driver.add(name, prompts[name[0]], seeded(seed))
        else:
            driver.fork(name, f"{name[0]}0", seeded(seed))
    assert driver.generate(20, chunk) == alone


def test_logits_are_computed_once_and_equal_bit_for_bit(
    checkpoint: Path, engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = engine(str(checkpoint))
    spy, driver = Spy(machine, monkeypatch), machine.driver
    prompts = dict(zip("ab", random_prompts(21, 8).values(), strict=True))
    for name, prompt in prompts.items():
        driver.add(name, prompt, seeded(0))
    driver.step({"a": 21, "b": 8})
    separate = dict(zip("ab", spy.logits[0], strict=True))
    for name, prompt in prompts.items():
        driver.finish(name)
        driver.add(name, prompt, seeded(0))
    forks = {"w": "b", "x": "a", "y": "a", "z": "b"}
    for seed, (name, source) in enumerate(forks.items()):
        driver.fork(name, source, seeded(seed))
    tokens = driver.step({"w": 0, "a": 21, "x": 0, "b": 8, "z": 0, "y": 0})
    assert spy.hidden == spy.attended == [2, 2], "no head and no attention for forks"
    for logits, source in zip(spy.logits[1], "baabba", strict=True):
        assert torch.equal(logits, separate[source])
    for name in list(driver.requests):
        driver.finish(name)
    for seed, (name, source) in enumerate(forks.items()):
        driver.add(name, prompts[source], seeded(seed))
    alone = driver.step({name: len(prompts[source]) for name, source in forks.items()})
    assert alone == {name: tokens[name] for name in forks}


def test_the_first_step_after_a_fork_sees_equal_blocks(checkpoint: Path, engine: Callable[..., Engine]) -> None:
    """Source and fork go on with the same token: all that they attend to must be equal, in blocks of their own or shared."""
    machine = engine(str(checkpoint))
    driver: PlanDriver = machine.driver
    [prompt] = random_prompts(21).values()
    driver.add("a", prompt, GREEDY)
    driver.fork("x", "a", GREEDY)
    driver.generate(1)
    driver.step({"a": 1, "x": 1})
    blocks = {name: driver.requests[name].blocks for name in "ax"}
    assert blocks["a"][:2] == blocks["x"][:2]
    assert blocks["a"][2] != blocks["x"][2]
    caches = machine.worker.runner.cache.device_caches
    for cache in caches.values():
        own, copied = (cache[blocks[name][2]] for name in "ax")
        assert own.any()
        assert torch.allclose(own, copied, atol=1e-5), "the prompt's tokens are copied, the new one is computed by each"


@pytest.mark.parametrize("sampling", [GREEDY, seeded(9)], ids=["greedy", "seeded"])
def test_forks_go_on_when_their_source_ends_or_is_preempted(
    sampling: SamplingParams, checkpoint: Path, engine: Callable[..., Engine]
) -> None:
    driver: PlanDriver = engine(str(checkpoint)).driver
    prompt, other = random_prompts(21, 40).values()
    driver.add("own", prompt, sampling)
    expected = driver.generate(20)["own"]
    driver.finish("own")
    driver.add("a", prompt, seeded(1))
    for name in ("x", "y"):
        driver.fork(name, "a", sampling)
    driver.step({"a": 21, "x": 0, "y": 0})
    driver.finish("a")  # its last block is copied in the very plan in which it leaves
    driver.add("other", other)
    driver.step({"other": 40, "x": 1, "y": 1})
    driver.preempt("y")
    found = driver.generate(20, chunk=9)
    assert found["x"] == found["y"] == expected


def test_forks_may_differ_in_all_that_they_ask_for(checkpoint: Path, engine: Callable[..., Engine]) -> None:
    driver: PlanDriver = engine(str(checkpoint)).driver
    [prompt] = random_prompts(21).values()
    asked = {
        "greedy": GREEDY,
        "penalised": SamplingParams(temperature=0.8, seed=3, max_tokens=None, repetition_penalty=1.3, frequency_penalty=0.5),
        "reported": SamplingParams(temperature=0.0, max_tokens=None, logprobs=3, presence_penalty=1.0),
        "bound": SamplingParams(temperature=1.0, seed=4, max_tokens=None, allowed_token_ids=(5, 6, 7, 8), logit_bias={6: 3.0}),
    }
    alone, reports = {}, {}
    for name, params in asked.items():
        driver.add(name, prompt, params)
        alone[name] = driver.generate(12)[name]
        reports[name] = driver.finish(name).logprobs
    driver.add("source", prompt, seeded(1))
    for name, params in asked.items():
        driver.fork(name, "source", params)
    found = driver.generate(12)
    assert {name: found[name] for name in asked} == alone
    for entry, other in zip(driver.requests["reported"].logprobs, reports["reported"], strict=True):
        assert entry.token_ids == other.token_ids
        assert entry.logprobs == pytest.approx(other.logprobs, abs=1e-4)
