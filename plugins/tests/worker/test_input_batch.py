"""The resident batch against the mirror that replays plans, and step inputs against plain loops."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.contracts.kv_allocator import NULL_BLOCK
from pegboard.testing.fakes import fake_kv_config, hash_model
from pegboard.testing.mirror import MirrorWorker
from pegboard.testing.plan_driver import PlanDriver
from pegboard.wire import ModelRunnerOutput, NewRequestData, SamplingParams, SchedulerOutput
from pegboard_plugins.worker.input_batch import InputBatch
from pegboard_plugins.worker.step_inputs import StepBuilder, StepInputs
from pegboard_plugins.worker.token_counts import ResidentCounts

BLOCK, BLOCKS, SLOTS = 4, 120, 6


def make_batch(**changes: Any) -> InputBatch:
    return InputBatch(**{"num_slots": SLOTS, "max_model_len": 64, "block_size": BLOCK, "vocab_limit": 1000, "seed": 0, **changes})


class BothWorkers:
    """Applies each plan to the mirror and to the batch, "samples" by a hash of all tokens, and compares."""

    def __init__(self, windows: Sequence[int | None] = (None,)) -> None:
        self.mirror = MirrorWorker(fake_kv_config(len(windows) * BLOCKS, BLOCK, windows))
        self.batch = make_batch(num_groups=len(windows))
        self.builder = StepBuilder(self.batch, 400, torch.device("cpu"), with_prompt_lens=True)
        self.model = hash_model()

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        plan = self.mirror.apply(plan)
        self.batch.leave(plan)
        self.batch.enter(plan)
        tokens: list[list[int]] = [[] for _ in plan.slots]
        if plan.slots:
            inputs = self.builder.build(plan)
            self.compare(plan, inputs)
            tokens = [
                [self.model(self.mirror.rows[slot].token_ids)] if count else []
                for slot, count in zip(plan.slots, plan.num_to_sample, strict=True)
            ]
            sampled = np.array([ids[0] for ids in tokens if ids], np.int64)
            self.batch.append_sampled(inputs.sample_slots, inputs.sample_lengths, sampled)
            self.mirror.sampled(plan, tokens)
        self.compare_state()
        return ModelRunnerOutput(step_id=plan.step_id, slots=plan.slots, sampled_token_ids=tokens)

    def compare(self, plan: SchedulerOutput, inputs: StepInputs) -> None:
        """Every array of the step against a loop over the mirror's rows."""
        ids, positions, places, prompts, last = [], [], [], [], []
        for slot, count, computed in zip(plan.slots, plan.num_scheduled_tokens, plan.num_computed_tokens, strict=True):
            row = self.mirror.rows[slot]
            for position in range(computed, computed + count):
                ids.append(row.token_ids[position])
                positions.append(position)
                places.append([blocks[position // BLOCK] * BLOCK + position % BLOCK for blocks in row.block_ids])
                prompts.append(row.prompt_len)
            last.append(len(ids) - 1)
        assert inputs.input_ids.tolist() == ids
        assert inputs.positions.tolist() == positions
        for group, step in enumerate(inputs.attention):
            assert step.slot_mapping.tolist() == [by_group[group] for by_group in places]
            assert step.query_start_loc.tolist() == [0, *(i + 1 for i in last)]
        assert inputs.prompt_lens is not None
        assert inputs.prompt_lens.tolist() == prompts
        rows = [i for i, n in enumerate(plan.num_to_sample) if n]
        assert inputs.sample_rows.tolist() == rows
        index = list(range(len(ids))) if inputs.sample_index is None else inputs.sample_index.tolist()
        assert index == [last[i] for i in rows]
        for i, slot in enumerate(plan.slots):
            length = plan.num_computed_tokens[i] + plan.num_scheduled_tokens[i]
            used = -(-length // BLOCK)
            for step, blocks in zip(inputs.attention, self.mirror.rows[slot].block_ids, strict=True):
                assert step.seq_lens[i] == length
                assert_in_sight(step.block_table[i, :used].tolist(), blocks[:used])

    def compare_state(self) -> None:
        assert set(np.flatnonzero(self.batch.occupied).tolist()) == set(self.mirror.rows)
        for slot, row in self.mirror.rows.items():
            count = int(self.batch.num_tokens[slot])
            assert self.batch.token_ids[slot, :count].tolist() == row.token_ids
            assert self.batch.prompt_lens[slot] == row.prompt_len
            for table, blocks in zip(self.batch.block_tables, row.block_ids, strict=True):
                assert_in_sight(table.blocks[slot, : table.lengths[slot]].tolist(), blocks)


def assert_in_sight(found: list[int], wanted: list[int]) -> None:
    """Equal where ``wanted`` has a block: what is behind a window may be anything."""
    assert [block if wish != NULL_BLOCK else wish for block, wish in zip(found, wanted, strict=True)] == wanted


@pytest.mark.parametrize("seed", range(6))
def test_random_plans_leave_the_batch_as_the_mirror_has_it(seed: int) -> None:
    rng = random.Random(seed)
    windows = [(None,), (None, 9), (6, None, 3)][seed % 3]
    both = BothWorkers(windows)
    driver = PlanDriver(both.execute, num_slots=SLOTS, block_size=BLOCK, num_blocks=len(windows) * BLOCKS, windows=windows)
    for step in range(60):
        if len(driver.requests) < SLOTS and rng.random() < 0.5:
            driver.add(f"r{step}", [rng.randrange(1000) for _ in range(rng.randint(1, 30))])
        for name in list(driver.requests):
            request = driver.requests[name]
            if len(request.token_ids) > 55 or rng.random() < 0.03:
                driver.finish(name)
            elif request.slot is not None and rng.random() < 0.05:
                driver.preempt(name)
        names = rng.sample(sorted(driver.requests), rng.randint(0, len(driver.requests)))
        chunks = {name: rng.randint(1, len(r.token_ids) - r.computed) for name in names for r in [driver.requests[name]]}
        driver.step(chunks)


def entering(slot: int = 0, **changes: Any) -> SchedulerOutput:
    fields = {
        "slot": slot,
        "request_id": "r",
        "token_ids": [1, 2, 3],
        "prompt_len": 3,
        "sampling": SamplingParams(),
        "stop_token_ids": [7],
        "block_ids": [[1]],
        **changes,
    }
    return SchedulerOutput(step_id=1, new_requests=[NewRequestData(**fields)])


def test_sampling_columns_follow_the_request() -> None:
    batch = make_batch()
    params = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.4, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3,
        seed=-1, min_tokens=2, logprobs=4,
    )  # fmt: skip
    batch.enter(entering(2, sampling=params, token_ids=[1, 2, 3, 4], prompt_len=3))
    found = batch.sampling_batch(np.array([2]), np.array([4], np.int32))
    columns = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "min_tokens",
    )
    for name in columns:
        assert getattr(found, name)[0] == pytest.approx(getattr(params, name)), name
    assert found.seeds.tolist() == [2**64 - 1]
    assert found.num_logprobs.tolist() == [4]
    assert found.positions.tolist() == [1]
    assert found.stop_token_ids == [[7]]
    assert found.slots.tolist() == [2]
    assert found.token_ids[2, :4].tolist() == [1, 2, 3, 4]


def test_requests_without_a_seed_get_one_from_engine_seed_and_id() -> None:
    first, same, other = make_batch(), make_batch(), make_batch(seed=1)
    for batch in (first, same, other):
        batch.enter(entering(0))
        batch.enter(entering(1, request_id="s"))
    assert first.seeds.tolist() == same.seeds.tolist()
    assert len({*first.seeds[:2].tolist(), *other.seeds[:2].tolist()}) == 4


def one_row(slot: int, count: int, computed: int, **changes: Any) -> SchedulerOutput:
    plan = SchedulerOutput(
        step_id=2, slots=[slot], num_scheduled_tokens=[count], num_computed_tokens=[computed], num_to_sample=[0]
    )
    for name, value in changes.items():
        setattr(plan, name, value)
    return plan


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (one_row(1, 1, 0), "slot 1, which has no request"),
        (one_row(0, 2, 2), "4 tokens of slot 0, which has 3 known tokens"),
        (one_row(0, 1, 0, spec_slots=[0], spec_token_ids=[[1]]), "draft tokens"),
    ],
)
def test_plans_that_do_not_fit_the_batch_are_refused(plan: SchedulerOutput, message: str) -> None:
    batch = make_batch()
    batch.enter(entering(0))
    with pytest.raises(ValueError, match=message):
        StepBuilder(batch, 10, torch.device("cpu")).build(plan)


def test_a_slot_is_not_entered_twice_and_a_context_not_overrun() -> None:
    batch = make_batch()
    batch.enter(entering(0))
    with pytest.raises(ValueError, match="slot 0, which another one holds"):
        batch.enter(entering(0))
    with pytest.raises(ValueError, match="65 tokens, the context holds 64"):
        batch.enter(entering(1, token_ids=[1] * 65))
    with pytest.raises(ValueError, match="given 18 blocks"):
        batch.enter(entering(1, block_ids=[list(range(1, 19))]))


def test_tokens_that_the_worker_lacks_are_appended_and_placeholders_are_its_own() -> None:
    batch = make_batch()
    batch.enter(entering(0))
    batch.enter(SchedulerOutput(step_id=2, token_slots=[0], token_ids=[[8, -1, 9]]))
    assert batch.token_ids[0, : batch.num_tokens[0]].tolist() == [1, 2, 3, 8, 9]


def test_the_largest_numbers_and_ids_of_any_text() -> None:
    batch = make_batch()
    largest = SamplingParams(top_k=2**31 - 1, min_tokens=2**31 - 1, max_tokens=None, logit_bias={2**31 - 1: 1.0})
    batch.enter(entering(0, request_id="\ud800", sampling=largest))
    found = batch.sampling_batch(np.array([0]), np.array([3], np.int32))
    assert (found.top_k[0], found.min_tokens[0], found.logit_bias[0][0][0]) == (2**31 - 1, 2**31 - 1, 2**31 - 1)


def test_what_few_requests_ask_for_is_there_for_their_rows_alone() -> None:
    batch = make_batch()
    batch.enter(entering(1, sampling=SamplingParams(logit_bias={9: -2.5, 4: 100.0})))
    batch.enter(entering(3, sampling=SamplingParams(allowed_token_ids=(8, 2, 8)), request_id="s"))
    batch.enter(entering(4, bad_word_ids=[[5], [6, 7]], request_id="t"))
    batch.enter(entering(0, request_id="u"))
    found = batch.sampling_batch(np.array([0, 4, 3, 1]), np.full(4, 3, np.int32))
    assert {row: (ids.tolist(), bias.tolist()) for row, (ids, bias) in found.logit_bias.items()} == {3: ([9, 4], [-2.5, 100.0])}
    assert {row: ids.tolist() for row, ids in found.allowed_token_ids.items()} == {2: [2, 8]}
    assert {row: list(words) for row, words in found.bad_words.items()} == {1: [[5], [6, 7]]}
    assert not found.token_counts
    batch.leave(SchedulerOutput(step_id=3, finished_slots=[1, 4], preempted_slots=[3]))
    for slot in (1, 3, 4):
        batch.enter(entering(slot, request_id="v"))
    again = batch.sampling_batch(np.array([1, 3, 4]), np.full(3, 3, np.int32))
    assert [again.logit_bias, again.allowed_token_ids, again.bad_words] == [{}, {}, {}]


def from_scratch(prompt: list[int], output: list[int]) -> dict[int, int]:
    return {token: output.count(token) for token in {*prompt, *output}}


Operation = tuple[str, int, list[int]]
actions = st.sampled_from(["enter", "resume", "leave", "sample", "append", "fail"])
some_tokens = st.lists(st.integers(0, 5), min_size=1, max_size=6)
operations = st.lists(st.tuples(actions, st.integers(0, 3), some_tokens), max_size=40)


@given(operations)
@settings(max_examples=150, deadline=None)
def test_counts_that_are_kept_equal_counts_from_scratch(steps: list[Operation]) -> None:
    """Requests enter, are preempted, come back with their output, leave; tokens come from samples, from plans that know them,
    from failed rows; not every row samples in every step."""
    batch = make_batch(max_model_len=400)
    rows: dict[int, tuple[list[int], list[int]]] = {}
    resting: list[tuple[list[int], list[int]]] = []
    for action, slot, tokens in steps:
        if action in ("enter", "resume") and slot not in rows:
            prompt, output = resting.pop() if action == "resume" and resting else (tokens, [])
            params = SamplingParams(presence_penalty=0.5 * (slot % 3))  # those in slots 0 and 3 have none
            batch.enter(entering(slot, token_ids=prompt + output, prompt_len=len(prompt), sampling=params))
            rows[slot] = (prompt, output)
        elif slot not in rows:
            continue
        elif action == "leave":
            batch.leave(SchedulerOutput(step_id=1, preempted_slots=[slot]))
            resting.append(rows.pop(slot))
        elif action == "append":
            batch.enter(SchedulerOutput(step_id=1, token_slots=[slot], token_ids=[[-1, *tokens, -1]]))
            rows[slot][1].extend(tokens)
        elif action in ("sample", "fail"):
            prompt, output = rows[slot]
            slots, lengths = np.array([slot]), np.array([len(prompt) + len(output)], np.int32)
            counts = batch.sampling_batch(slots, lengths).token_counts
            assert set(counts) == ({0} if slot % 3 else set())
            for each in counts.values():
                found = dict(zip(each.ids.tolist(), each.output_counts.tolist(), strict=True))
                assert found == from_scratch(prompt, output)
                assert (each.ids.dtype, each.output_counts.dtype) == (np.int64, np.int32)
            batch.append_sampled(slots, lengths, np.array([-1 if action == "fail" else tokens[0]]))
            output.append(0 if action == "fail" else tokens[0])


def test_counts_follow_tokens_that_are_taken_back() -> None:
    counts = ResidentCounts(prompt_len=2)
    for known in ([5, 6], [5, 6, 6], [5, 6, 6, 7, 8], [5, 6, 6], [5, 6, 6, 9]):
        found = counts.of(np.array(known, np.int32))
        assert dict(zip(found.ids.tolist(), found.output_counts.tolist(), strict=True)) == from_scratch(known[:2], known[2:])


def test_counts_grow_with_an_output_of_many_tokens() -> None:
    counts, known = ResidentCounts(prompt_len=1), [3]
    for token in range(300):
        known += [token, 3]
        found = counts.of(np.array(known, np.int32))
    assert dict(zip(found.ids.tolist(), found.output_counts.tolist(), strict=True)) == from_scratch([3], known[1:])


def test_an_engine_without_a_seed_counts_as_seed_0() -> None:
    zero, none = make_batch(), make_batch(seed=None)
    for batch in (zero, none):
        batch.enter(entering(0))
    assert zero.seeds[0] == none.seeds[0]
