"""The mirror and the fake runner refuse forks that would leave a request with wrong keys and values."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.testing.fakes import FakeRunner, fake_kv_config, hash_model
from pegboard.testing.mirror import MirrorWorker
from pegboard.wire import NewRequestData, SamplingParams, SchedulerOutput

BLOCK = 4
PROMPT = list(range(6))


def new_request(slot: int, blocks: list[int], computed: int, prompt: list[int] = PROMPT) -> NewRequestData:
    return NewRequestData(
        slot=slot,
        request_id=f"r{slot}",
        token_ids=prompt,
        prompt_len=len(prompt),
        sampling=SamplingParams(),
        stop_token_ids=[],
        block_ids=[blocks],
        num_computed_tokens=computed,
    )


def forking_plan(**changes: Any) -> SchedulerOutput:
    """Slot 0 computes the prompt in blocks 1 and 2; slot 1 is forked and gets block 3 for its own end."""
    fields: dict[str, Any] = {
        "step_id": 1,
        "slots": [0, 1],
        "num_scheduled_tokens": [6, 0],
        "num_computed_tokens": [0, 6],
        "num_to_sample": [1, 1],
        "new_requests": [new_request(0, [1, 2], 0), new_request(1, [1, 3], 6)],
        "fork_slots": [1],
        "fork_sources": [0],
    }
    return SchedulerOutput(**{**fields, **changes})


def decoding_plan(step_id: int = 2, **changes: Any) -> SchedulerOutput:
    fields: dict[str, Any] = {
        "step_id": step_id,
        "slots": [0, 1],
        "num_scheduled_tokens": [1, 1],
        "num_computed_tokens": [4 + step_id, 4 + step_id],
        "num_to_sample": [1, 1],
    }
    return SchedulerOutput(**{**fields, **changes})


def make_runner() -> FakeRunner:
    return FakeRunner(MirrorWorker(fake_kv_config(9, BLOCK), max_num_seqs=4), hash_model())


def test_a_fork_whose_copy_comes_in_the_next_plan() -> None:
    runner = make_runner()
    runner.execute_model(forking_plan())
    runner.execute_model(decoding_plan(block_copies=[(2, 3)]))
    runner.execute_model(decoding_plan(3))


def test_a_fork_that_leaves_needs_no_copy() -> None:
    runner = make_runner()
    runner.execute_model(forking_plan())
    runner.execute_model(
        decoding_plan(finished_slots=[1], slots=[0], num_scheduled_tokens=[1], num_computed_tokens=[6], num_to_sample=[1])
    )


@pytest.mark.parametrize("copies", [[], [(1, 3)], [(2, 4)]])
def test_a_copy_that_is_missing_or_of_other_blocks(copies: list[tuple[int, int]]) -> None:
    runner = make_runner()
    runner.execute_model(forking_plan())
    with pytest.raises(AssertionError, match=r"does not make the copies \{\(2, 3\)\}"):
        runner.execute_model(decoding_plan(block_copies=copies))


def test_copies_that_depend_on_their_order() -> None:
    runner = make_runner()
    runner.execute_model(forking_plan())
    with pytest.raises(AssertionError, match="depends on their order"):
        runner.execute_model(decoding_plan(block_copies=[(2, 3), (1, 2)]))


def test_a_block_is_read_as_it_was_when_it_was_copied() -> None:
    """Slot 2 says that it holds the first five tokens, but the plan that copies them runs before they are computed."""
    runner = make_runner()
    runner.execute_model(forking_plan(block_copies=[(2, 5)]))
    enters = {"new_requests": [new_request(2, [1, 5], 5)], "slots": [2], "num_scheduled_tokens": [1], "num_computed_tokens": [5]}
    with pytest.raises(AssertionError, match=r"block 5 .* holds other data"):
        runner.execute_model(decoding_plan(block_copies=[(2, 3)], num_to_sample=[1], **enters))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fork_slots": [], "fork_sources": []}, "nothing to compute"),
        ({"num_scheduled_tokens": [6, 1], "num_computed_tokens": [0, 5]}, "is forked and computes 1 tokens"),
        ({"fork_sources": [2]}, "both need a row"),
        ({"fork_sources": [1]}, "computes nothing"),
        ({"new_requests": [new_request(0, [1, 2], 0), new_request(1, [1, 3], 6, [9, *PROMPT[1:]])]}, "another prompt"),
        ({"num_scheduled_tokens": [5, 0], "num_to_sample": [0, 1]}, "does not end its prompt"),
        ({"new_requests": [new_request(0, [1, 2], 0), new_request(1, [4, 3], 6)]}, "does not share its full blocks"),
        ({"new_requests": [new_request(0, [1, 2], 0), new_request(1, [1, 2], 6)]}, "slot 0 writes block 2 of slot 1"),
    ],
)
def test_forks_that_no_worker_could_follow(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        make_runner().execute_model(forking_plan(**changes))
