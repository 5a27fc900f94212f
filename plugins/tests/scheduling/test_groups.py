"""Several answers to one prompt: who computes it, who is forked when, and what is shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pegboard.contracts.admission_policy import AdmissionPolicy, Admit, Hold, Skip
from pegboard.contracts.scheduler import PauseState
from pegboard.testing.adversaries import Preempts
from pegboard.testing.driver import SchedulerDriver, make_group, make_request
from pegboard.wire import SchedulerOutput

DriverOf = Callable[..., SchedulerDriver]
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
CACHES = pytest.mark.parametrize("allocator", ["paged", "prefix"])


def entered(plan: SchedulerOutput) -> list[tuple[str, int]]:
    """Requests that enter with ``plan``, and their computed tokens."""
    return [(new.request_id, new.num_computed_tokens) for new in plan.new_requests]


def num_blocks_in_use(driver: SchedulerDriver) -> int:
    kv = driver.scheduler.kv  # type: ignore[attr-defined]
    return kv.num_usable_blocks - kv.allocator.num_free


# -- together ----------------------------------------------------------------------------------------------------------


@DEPTHS
@CACHES
@pytest.mark.parametrize("prompt_len", [512, 520])
@pytest.mark.parametrize("budget", [64, 512, 2048])
def test_eight_answers_compute_their_prompt_once(
    driver_of: DriverOf, budget: int, prompt_len: int, allocator: str, depth: int
) -> None:
    driver = driver_of(200, 16, depth=depth, allocator=allocator, max_num_batched_tokens=budget)
    group = make_group("g", range(prompt_len), 8, 6)
    driver.add(*group)
    while not driver.plan().fork_slots:
        driver.book()
    prompt_blocks, partial = divmod(prompt_len, 16)
    assert num_blocks_in_use(driver) == prompt_blocks + 8 * bool(partial)
    assert driver.scheduler.stats().num_scheduled_tokens == prompt_len
    driver.run()
    driver.assert_right(*group)
    assert driver.scheduler.stats().num_scheduled_tokens == prompt_len + 8 * 5
    most_at_once = max(sum(map(len, (plan.new_requests, plan.block_slots))) for plan in driver.plans)
    assert most_at_once <= 8


def test_what_the_worker_is_told(driver_of: DriverOf) -> None:
    driver = driver_of()
    driver.add(*make_group("g", range(6), 3))
    plan = driver.plan()
    assert (plan.slots, plan.fork_slots, plan.fork_sources) == ([0, 1, 2], [1, 2], [0, 0])
    assert (plan.num_scheduled_tokens, plan.num_computed_tokens, plan.num_to_sample) == ([6, 0, 0], [0, 6, 6], [1, 1, 1])
    source, *children = plan.new_requests
    assert [child.token_ids for child in children] == [source.token_ids] * 2
    assert [child.block_ids[0][0] for child in children] == [source.block_ids[0][0]] * 2
    tails = [new.block_ids[0][1] for new in plan.new_requests]
    assert len(set(tails)) == 3
    assert plan.block_copies == []
    driver.book()
    assert driver.plan().block_copies == [(tails[0], tails[1]), (tails[0], tails[2])]
    driver.book()
    assert driver.plan().block_copies == []


@DEPTHS
@CACHES
@pytest.mark.parametrize("prompt_len", [4, 8])
def test_a_prompt_of_whole_blocks_needs_no_copies(driver_of: DriverOf, prompt_len: int, allocator: str, depth: int) -> None:
    driver = driver_of(depth=depth, allocator=allocator)
    group = make_group("g", range(prompt_len), 4)
    driver.add(*group)
    driver.run()
    driver.assert_right(*group)
    assert len(driver.plans[0].fork_slots) == 3
    assert not any(plan.block_copies for plan in driver.plans)


@DEPTHS
@CACHES
@pytest.mark.parametrize("block_size", [1, 4])
def test_a_prompt_of_one_token(driver_of: DriverOf, block_size: int, allocator: str, depth: int) -> None:
    driver = driver_of(block_size=block_size, depth=depth, allocator=allocator, max_num_seqs=3)
    group = make_group("g", [7], 5)
    driver.add(*group)
    assert driver.plan().num_scheduled_tokens == [1, 0, 0]
    driver.run()
    driver.assert_right(*group)


@DEPTHS
def test_answers_end_one_by_one(driver_of: DriverOf, depth: int) -> None:
    """Also with the first token, before the copy for it is made."""
    driver = driver_of(depth=depth)
    group = [make_request(f"r{i}", range(6), 1 + i // 2, group="g", variant=i) for i in range(8)]
    driver.add(*group)
    driver.run()
    driver.assert_right(*group)
    assert driver.scheduler.stats().num_scheduled_tokens >= 6 + sum(i // 2 for i in range(8))


@DEPTHS
def test_with_pipeline_stages(driver_of: DriverOf, depth: int) -> None:
    """Nobody goes on before the first token is known; the copies are made all the same."""
    driver = driver_of(stages=2, depth=depth, max_num_batched_tokens=5)
    group, other = make_group("g", range(14), 4), make_request("other", range(20, 40), 9)
    driver.add(*group, other)
    driver.run()
    driver.assert_right(*group, other)
    assert sum(len(plan.fork_slots) for plan in driver.plans) == 3


def test_two_groups_of_layers(driver_of: DriverOf) -> None:
    driver = driver_of(windows=(None, None))
    group = make_group("g", range(6), 3)
    driver.add(*group)
    driver.run()
    driver.assert_right(*group)
    assert len(driver.plans[1].block_copies) == 4


def test_statistics_count_the_prompt_once(driver_of: DriverOf) -> None:
    driver = driver_of(max_num_seqs=3)
    driver.add(make_request("before", range(10), 1))
    driver.run()
    group = [make_request(f"g/{i}", range(14), 3 + 2 * i, group="g", variant=i) for i in range(5)]
    driver.add(*group)
    driver.run()
    assert [driver.last[r.request_id].num_cached_tokens for r in group] == [8] * 5
    stats = driver.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (10 + 14, 8)


def test_a_child_publishes_what_its_source_did_not(driver_of: DriverOf) -> None:
    """The last block is full with one more token; the source is aborted before that step's result is in."""
    driver = driver_of(max_num_batched_tokens=7)
    driver.add(*make_group("g", range(8), 2, 1))
    driver.step()
    assert driver.plan().fork_slots
    driver.abort(["g/0"])
    driver.book()
    driver.run()
    driver.add(make_request("next", range(9), 1))
    driver.run()
    assert driver.last["next"].num_cached_tokens == 8


def test_other_prompts_under_the_same_name_are_another_group(driver_of: DriverOf) -> None:
    driver = driver_of()
    requests = [make_request(f"r{i}", range(i % 2, 9), 5, group="g", variant=i) for i in range(4)]
    driver.add(*requests)
    assert driver.plan().num_scheduled_tokens == [9, 8, 0, 0]
    driver.run()
    driver.assert_right(*requests)


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_members_are_passed_over_while_one_computes(driver_of: DriverOf) -> None:
    driver = driver_of(max_num_batched_tokens=16, long_prefill_token_threshold=8)
    driver.add(*make_group("g", range(20), 3), make_request("other", [1, 2], 9))
    assert entered(driver.plan()) == [("g/0", 0), ("other", 0)]
    driver.book()
    assert entered(driver.plan()) == []
    driver.book()
    assert entered(driver.plan()) == [("g/1", 20), ("g/2", 20)]


@pytest.mark.parametrize("phase", [1, 2])
def test_if_the_one_that_computes_is_aborted_the_next_one_does(driver_of: DriverOf, phase: int) -> None:
    driver = driver_of(max_num_batched_tokens=8, depth=2, allocator="paged")
    group = make_group("g", range(20), 3)
    driver.add(*group)
    for _ in range(phase):
        driver.plan()
    driver.abort(["g/0"])
    assert entered(driver.plan()) == [("g/1", 0)]
    driver.run()
    driver.assert_right(*group[1:])
    assert [entry for plan in driver.plans for entry in entered(plan)] == [("g/0", 0), ("g/1", 0), ("g/2", 20)]


def test_if_the_one_that_computes_is_preempted_one_of_them_starts_again(driver_of: DriverOf) -> None:
    policy = Preempts()
    driver = driver_of(parts={"preemption_policy": lambda: policy}, max_num_batched_tokens=9, allocator="paged")
    old, group = make_request("old", [1], 30), make_group("g", range(20), 3)
    driver.add(old, *group)
    driver.step()
    policy.victim = "g/0"
    assert driver.plan().preempted_slots == [1]
    driver.book()
    assert entered(driver.plan()) == [("g/0", 0)]
    driver.run()
    driver.assert_right(old, *group)


def test_nothing_is_forked_in_a_plan_that_preempts(driver_of: DriverOf) -> None:
    policy = Preempts()
    driver = driver_of(parts={"preemption_policy": lambda: policy}, max_num_batched_tokens=13)
    old, young, group = make_request("old", [1], 30), make_request("young", [2], 30), make_group("g", range(20), 3)
    driver.add(old, young, *group)
    driver.step()
    policy.victim = "young"
    plan = driver.plan()
    assert plan.num_to_sample == [1, 1], "the group's prompt ends here"
    assert (plan.preempted_slots, plan.new_requests, plan.fork_slots) == ([1], [], [])
    driver.book()
    assert entered(driver.plan()) == [("young", 0), ("g/1", 19), ("g/2", 19)]
    driver.run()
    driver.assert_right(old, young, *group)


def test_a_pause_of_new_requests_holds_members_too(driver_of: DriverOf) -> None:
    driver = driver_of(max_num_batched_tokens=10)
    group = make_group("g", range(15), 3, 20)
    driver.add(*group)
    driver.step()
    driver.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert driver.plan().fork_slots == []
    driver.book()
    driver.step()
    driver.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert entered(driver.plan()) == [("g/1", 14), ("g/2", 14)]
    driver.run()
    driver.assert_right(*group)


def test_in_a_pause_only_those_resume_that_were_running(driver_of: DriverOf) -> None:
    policy = Preempts()
    driver = driver_of(parts={"preemption_policy": lambda: policy}, max_num_seqs=3)
    old, young, group = make_request("old", [1], 30), make_request("young", [2], 30), make_group("g", range(6), 3, 30)
    driver.add(old, young, *group)
    driver.step()
    driver.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    policy.victim = "young"
    driver.step()
    driver.abort(["old"])
    assert [name for name, _ in entered(driver.plan())] == ["young"]
    driver.book()
    driver.scheduler.set_pause_state(PauseState.UNPAUSED)
    driver.run()
    driver.assert_right(young, *group)


# -- later -------------------------------------------------------------------------------------------------------------


@DEPTHS
@CACHES
@pytest.mark.parametrize("prompt_len", [2, 7, 8, 9, 21])
def test_members_without_a_slot_follow_with_one_token(driver_of: DriverOf, prompt_len: int, allocator: str, depth: int) -> None:
    driver = driver_of(depth=depth, allocator=allocator, max_num_seqs=3)
    group = make_group("g", range(prompt_len), 8, 5)
    for place, request in enumerate(group):  # nobody ends together, so there is always one to follow
        group[place] = make_request(request.request_id, range(prompt_len), 4 + 3 * place, group="g", variant=place)
    driver.add(*group)
    driver.run()
    driver.assert_right(*group)
    late = [computed for plan in driver.plans[1:] for _, computed in entered(plan)]
    assert late == [prompt_len - 1] * 5
    if depth == 1:
        decoded = sum(len(driver.tokens[r.request_id]) - 1 for r in group)
        assert driver.scheduler.stats().num_scheduled_tokens == prompt_len + 5 + decoded


def test_a_member_without_a_copy_to_wait_for_is_followed_at_once(driver_of: DriverOf) -> None:
    driver = driver_of(max_num_seqs=2)
    group = [make_request(f"g/{i}", range(8), 1 if i == 0 else 9, group="g", variant=i) for i in range(3)]
    driver.add(*group)
    driver.step()
    assert list(driver.finished) == ["g/0"]
    assert entered(driver.plan()) == [("g/2", 7)]
    driver.run()
    driver.assert_right(*group)


@pytest.mark.parametrize("chunks_of_another", [0, 1])
def test_a_member_with_output_computes_for_itself(driver_of: DriverOf, chunks_of_another: int) -> None:
    """Beside members that have computed the prompt, and in the plan in which another one ends it."""
    policy = Preempts()
    driver = driver_of(parts={"preemption_policy": lambda: policy}, long_prefill_token_threshold=8, allocator="paged")
    group = make_group("g", range(20), 3, 9)
    late = make_request("late", range(20), 9, group="g", variant=7, prompt_logprobs=True)
    driver.add(*group)
    for _ in range(4):
        driver.step()
    driver.add(late)
    for _ in range(chunks_of_another):
        driver.step()
    policy.victim = "g/2"
    driver.step()
    plan = driver.plan()
    assert entered(plan)[0] == ("g/2", 0)
    assert (plan.num_to_sample[2] == 1) == bool(chunks_of_another)
    driver.run()
    driver.assert_right(*group, late)


def test_members_whose_group_has_ended_compute_again(driver_of: DriverOf) -> None:
    driver = driver_of(allocator="paged", max_num_seqs=2)
    group = make_group("g", range(9), 5, 4)
    driver.add(*group)
    driver.run()
    driver.assert_right(*group)
    assert [computed for plan in driver.plans for _, computed in entered(plan)] == [0, 9, 0, 9, 0]


class Members(AdmissionPolicy):
    """Answers ``answer`` for those of the group that have not computed anything, while others run."""

    answer: Any = None

    def admit(self, request: Any, context: Any) -> Any:
        return self.answer if context.num_running else None


@pytest.mark.parametrize("answer", [Hold(), Skip(), Admit(reserve_blocks=96)])
def test_the_admission_policy_is_asked_for_each_member(driver_of: DriverOf, answer: Any) -> None:
    """And its reserve counts: the source holds 4 of 100 blocks, a child takes one more."""
    policy = Members()
    policy.answer = answer
    driver = driver_of(parts={"admission_policy": lambda: policy})
    group = make_group("g", range(14), 3, 20)
    driver.add(*group)
    assert entered(driver.plan()) == [("g/0", 0)]
    policy.answer = Admit(reserve_blocks=95)
    driver.book()
    assert entered(driver.plan()) == [("g/1", 13)]
    policy.answer = None
    driver.run()
    driver.assert_right(*group)


def test_a_request_in_front_that_finds_no_room_is_not_overtaken(driver_of: DriverOf) -> None:
    driver = driver_of(8, 4, max_num_batched_tokens=11, parts={"admission_policy": lambda: Front()})
    first, group = make_request("big", range(30), 1, priority=-1), make_group("g", range(14), 3, 4)
    driver.add(group[0])
    driver.step()
    driver.add(first, *group[1:])
    assert entered(driver.plan()) == []
    driver.book()
    driver.run()
    driver.assert_right(first, *group)
    assert next(new for plan in driver.plans[1:] for new in plan.new_requests).request_id == "big"


class Front(AdmissionPolicy):
    def admit(self, request: Any, context: Any) -> Any:
        return Admit()
