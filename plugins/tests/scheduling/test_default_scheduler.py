"""What the default scheduler adds to the contract: plans, drafts, pipelines, results, statistics and events."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from pegboard.contracts.event_sink import Event, EventSink
from pegboard.contracts.preemption_policy import BlockNeed, PreemptionPolicy
from pegboard.contracts.views import RequestView, SchedulingView
from pegboard.testing.adversaries import RaisingSink
from pegboard.testing.driver import SchedulerDriver, make_request
from pegboard.testing.fakes import hash_model
from pegboard.wire import FinishReason, Logprobs, ModelRunnerOutput, SchedulerOutput

MODEL = hash_model(1000)
DriverOf = Callable[..., SchedulerDriver]


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_steady_decode_plan_costs_a_few_bytes_a_request(driver_of: DriverOf) -> None:
    driver = driver_of(2000, 16, max_num_seqs=64, max_num_batched_tokens=4096)
    driver.add(*(make_request(f"request-{i}", range(i, i + 33), 100) for i in range(64)))
    for _ in range(4):
        driver.step()
    plan = driver.plan()
    assert len(plan.slots) == 64
    assert not plan.new_requests
    assert not plan.token_ids
    assert len(msgspec.msgpack.encode(plan)) < 64 * 5 + 100


def test_prefill_and_decode_share_a_plan(driver_of: DriverOf) -> None:
    driver = driver_of(max_num_batched_tokens=10)
    driver.add(make_request("a", [1, 2], 20))
    driver.step()
    driver.add(make_request("b", range(30), 3))
    plan = driver.plan()
    assert plan.num_scheduled_tokens == [1, 9]
    assert plan.num_to_sample == [1, 0]


def test_the_threshold_leaves_room_for_the_next_prompt(driver_of: DriverOf) -> None:
    driver = driver_of(max_num_batched_tokens=16, long_prefill_token_threshold=6)
    driver.add(make_request("a", range(30), 3), make_request("b", range(3), 3))
    assert driver.plan().num_scheduled_tokens == [6, 3]


def test_a_slot_is_told_free_and_given_again_in_one_plan(driver_of: DriverOf) -> None:
    driver = driver_of(max_num_seqs=1)
    requests = [make_request(f"r{i}", [i + 1], 2) for i in range(3)]
    driver.add(*requests)
    driver.run()
    driver.assert_right(*requests)
    reused = [plan for plan in driver.plans if plan.new_requests and plan.finished_slots == [0]]
    assert [plan.new_requests[0].slot for plan in reused] == [0, 0]


def test_what_the_worker_is_told_of_a_request(driver_of: DriverOf) -> None:
    driver = driver_of()
    request = make_request("r", range(6), 5, stop_token_ids=[7, 8], variant=3)
    request = msgspec.structs.replace(request, bad_word_ids=[[5], [6, 7]])
    driver.add(request)
    (new,) = driver.plan().new_requests
    assert (new.slot, new.request_id, new.token_ids, new.prompt_len, new.num_computed_tokens) == (0, "r", [*range(6)], 6, 0)
    assert (new.sampling, new.ext) == (request.sampling, request.ext)
    assert (new.stop_token_ids, new.bad_word_ids) == ([7, 8], [[5], [6, 7]])
    assert [len(blocks) for blocks in new.block_ids] == [2]


def test_two_groups_of_layers_take_blocks_from_one_pool(driver_of: DriverOf) -> None:
    driver = driver_of(21, 4, windows=(None, None))
    requests = [make_request(f"r{i}", range(i, i + 10), 20) for i in range(4)]
    driver.add(*requests)
    driver.run()
    assert driver.scheduler.stats().num_preemptions > 0
    driver.assert_right(*requests)


# -- drafts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("right", [0, 1, 3])
def test_drafts_change_the_number_of_steps_and_no_token(driver_of: DriverOf, depth: int, right: int) -> None:
    """``right`` of three draft tokens are those that the model gives."""

    def propose(token_ids: Sequence[int]) -> list[int]:
        tokens = list(token_ids)
        for place in range(3):
            tokens.append(MODEL(tokens) if place < right else 1000)
        return tokens[len(token_ids) :]

    driver = driver_of(60, 4, depth=depth, propose=propose)
    requests = [make_request(f"r{i}", range(i, i + 9), 20 + i, stop_token_ids=[4, 5, 6]) for i in range(6)]
    driver.add(*requests)
    driver.run()
    driver.assert_right(*requests)
    if depth == 1:
        drafted = [plan for plan in driver.plans if plan.spec_slots]
        assert drafted
        assert all(max(plan.num_to_sample) <= 4 for plan in drafted)
        longest = max(len(tokens) for tokens in driver.tokens.values())
        assert len([plan for plan in driver.plans if plan.slots]) <= 2 + -(-longest // (right + 1))


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_in_a_tight_pool(driver_of: DriverOf, depth: int) -> None:
    def propose(token_ids: Sequence[int]) -> list[int]:
        return [MODEL(token_ids), 1000]

    driver = driver_of(14, 4, depth=depth, propose=propose, max_num_batched_tokens=9)
    requests = [make_request(f"r{i}", [i, *range(6)], 20) for i in range(6)]
    driver.add(*requests)
    driver.run()
    assert driver.scheduler.stats().num_preemptions > 0
    driver.assert_right(*requests)


# -- pipelines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_with_pipeline_stages_tokens_travel_in_the_plan(driver_of: DriverOf, depth: int) -> None:
    driver = driver_of(20, 4, depth=depth, stages=2, max_num_batched_tokens=12)
    requests = [make_request(f"r{i}", range(i, i + 7), 12) for i in range(6)]
    driver.add(*requests)
    driver.run()
    assert driver.scheduler.stats().num_preemptions > 0
    assert any(plan.token_slots for plan in driver.plans)
    driver.assert_right(*requests)


@pytest.mark.parametrize(("stages", "most"), [(1, 6), (2, 3), (4, 2)])
def test_every_stage_has_a_share_of_the_requests(driver_of: DriverOf, stages: int, most: int) -> None:
    """They arrive together; if they stayed together, one stage would work and the others wait."""
    driver = driver_of(stages=stages, depth=stages)
    requests = [make_request(f"r{i}", range(i, i + 5), 20) for i in range(6)]
    driver.add(*requests)
    driver.run()
    decodes = [plan for plan in driver.plans if plan.slots and not plan.new_requests]
    assert {len(plan.slots) for plan in decodes} == {most}
    driver.assert_right(*requests)


def test_an_executor_that_overlaps_nothing_serves_all_in_turn(driver_of: DriverOf) -> None:
    driver = driver_of(stages=2, depth=1)
    requests = [make_request(f"r{i}", range(i, i + 5), 20) for i in range(6)]
    driver.add(*requests)
    driver.run()
    for one, next_one in itertools.pairwise(driver.plans[1:30]):
        assert {*one.slots, *next_one.slots} == set(range(6))
    driver.assert_right(*requests)


# -- results -----------------------------------------------------------------------------------------------------------


def outputs_of(plan: SchedulerOutput, order: list[int], **fields: Any) -> ModelRunnerOutput:
    slots = [plan.slots[i] for i in order]
    tokens = [[100 + slot] if plan.num_to_sample[i] else [] for i, slot in zip(order, slots, strict=True)]
    return ModelRunnerOutput(step_id=plan.step_id, slots=slots, sampled_token_ids=tokens, **fields)


def test_a_worker_may_answer_in_another_order(driver_of: DriverOf) -> None:
    scheduler = driver_of().scheduler
    for i in range(3):
        scheduler.add_request(make_request(f"r{i}", [i + 1], 5))
    plan = scheduler.schedule()
    logprobs = {0: [Logprobs([102], [-0.5], 1)]}
    messages = scheduler.update_from_output(plan, outputs_of(plan, [2, 0, 1], logprobs=logprobs, errors={1: "bad"}))
    by_id = {message.request_id: message for message in messages}
    assert by_id["r2"].new_token_ids == [102]
    assert by_id["r2"].logprobs == logprobs[0]
    assert by_id["r1"].new_token_ids == [101]
    assert by_id["r1"].logprobs == []
    assert (by_id["r0"].finish_reason, by_id["r0"].stop_reason) == (FinishReason.ERROR, "bad")


def test_logprobs_are_cut_with_the_tokens(driver_of: DriverOf) -> None:
    driver = driver_of(propose=lambda token_ids: [7, 8, 9])
    scheduler = driver.scheduler
    scheduler.add_request(make_request("r", [1], 20, stop_token_ids=[8]))
    plan = scheduler.schedule()
    output = ModelRunnerOutput(step_id=plan.step_id, slots=plan.slots, sampled_token_ids=[[5]], draft_token_ids=[[7, 8, 9]])
    scheduler.update_from_output(plan, output)
    plan = scheduler.schedule()
    assert (plan.spec_token_ids, plan.num_scheduled_tokens, plan.num_to_sample) == ([[7, 8, 9]], [4], [4])
    logprobs = {0: [Logprobs([token], [-1.0], 1) for token in (7, 8, 9, 3)]}
    output = ModelRunnerOutput(step_id=plan.step_id, slots=plan.slots, sampled_token_ids=[[7, 8, 9, 3]], logprobs=logprobs)
    (message,) = scheduler.update_from_output(plan, output)
    assert message.new_token_ids == [7, 8]
    assert [entry.token_ids for entry in message.logprobs] == [[7], [8]]
    assert (message.finish_reason, message.stop_reason) == (FinishReason.STOP, 8)
    scheduler.check_integrity()


@pytest.mark.parametrize("tokens", [[], [1, 2]])
def test_a_worker_that_answers_with_the_wrong_number_of_tokens(driver_of: DriverOf, tokens: list[int]) -> None:
    scheduler = driver_of().scheduler
    scheduler.add_request(make_request("r", [1], 5))
    plan = scheduler.schedule()
    output = ModelRunnerOutput(step_id=plan.step_id, slots=plan.slots, sampled_token_ids=[tokens])
    with pytest.raises(RuntimeError, match=f"{len(tokens)} tokens for request 'r'"):
        scheduler.update_from_output(plan, output)


def test_results_out_of_order_are_refused(driver_of: DriverOf) -> None:
    scheduler = driver_of().scheduler
    scheduler.add_request(make_request("r", [1], 5))
    scheduler.schedule()
    second = scheduler.schedule()
    with pytest.raises(RuntimeError, match="order of the plans"):
        scheduler.update_from_output(second, outputs_of(second, [0]))


def test_answers_for_other_slots_are_refused(driver_of: DriverOf) -> None:
    scheduler = driver_of().scheduler
    scheduler.add_request(make_request("r", [1], 5))
    plan = scheduler.schedule()
    output = ModelRunnerOutput(step_id=plan.step_id, slots=[9], sampled_token_ids=[[1]])
    with pytest.raises(RuntimeError, match=r"\[9\]"):
        scheduler.update_from_output(plan, output)


@pytest.mark.parametrize("depth", [1, 2])
def test_every_full_block_can_be_found_again(driver_of: DriverOf, depth: int) -> None:
    for num_prompt in range(1, 10):
        for num_output in range(1, 10):
            driver = driver_of(depth=depth)
            driver.add(make_request("first", range(num_prompt), num_output))
            driver.run()
            driver.add(make_request("next", [*range(num_prompt), *driver.tokens["first"], 0], 1))
            driver.run()
            assert driver.last["next"].num_cached_tokens == (num_prompt + num_output - 1) // 4 * 4


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [7, 16, 1000])
def test_prompts_that_arrive_together_compute_their_common_prefix_once(driver_of: DriverOf, budget: int, depth: int) -> None:
    """A step writes all keys and values before it reads any, so even rows of one plan share what it computes."""
    driver = driver_of(max_num_batched_tokens=budget, depth=depth)
    prefix = list(range(40))
    requests = [make_request(f"r{i}", [*prefix, 100 + i, 200 + i], 3) for i in range(5)]
    driver.add(*requests)
    driver.run()
    driver.assert_right(*requests)
    stats = driver.scheduler.stats()
    assert stats.num_scheduled_tokens == 40 + 5 * 2 + 5 * 2, "the prefix, five ends of a prompt, two tokens decoded by each"
    assert stats.prefix_hits == 4 * 40


class OldestFirst(PreemptionPolicy):
    """Its victims may have a row in the plan already."""

    def victims(self, need: BlockNeed, candidates: Sequence[RequestView], context: SchedulingView) -> Sequence[str]:
        return [c.request_id for c in candidates if c.request_id != need.requester]


def test_a_chunk_that_leaves_the_plan_is_not_shared(driver_of: DriverOf) -> None:
    """Blocks that a plan would have filled, had their request not been preempted in that plan, hold nothing."""
    driver = driver_of(14, long_prefill_token_threshold=4, parts={"preemption_policy": OldestFirst})
    requests = [make_request("old", [1], 20), make_request("prefill", range(40), 5), make_request("young", [2, 3, 4], 8)]
    driver.add(*requests)
    driver.run()
    driver.assert_right(*requests)
    assert driver.last["prefill"].num_preemptions > 0


# -- statistics and events ---------------------------------------------------------------------------------------------


def test_statistics(driver_of: DriverOf) -> None:
    driver = driver_of(10, 4, max_num_seqs=1)
    driver.add(make_request("a", range(9), 4), make_request("b", range(9), 4))
    driver.plan()
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (1, 1, 0.3)
    assert (stats.step, stats.num_scheduled_tokens) == (1, 9)
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (18, 8)
    assert stats.num_scheduled_tokens == 9 + 3 + 1 + 3
    assert stats.degraded == []


class Recorder(EventSink):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def test_events_tell_each_request_s_story(driver_of: DriverOf) -> None:
    recorder = Recorder()
    driver = driver_of(6, 4, sinks=[recorder])
    requests = [make_request("a", range(8), 12), make_request("b", range(1, 6), 12)]
    driver.add(*requests)
    driver.run()
    driver.assert_right(*requests)
    stories: dict[str, list[str]] = {"a": [], "b": []}
    for event in recorder.events:
        stories[event.request_id].append(event.kind)
    assert stories["a"] == ["queued", "scheduled", "first_token", "finished"]
    assert stories["b"] == ["queued", "scheduled", "first_token", "preempted", "resumed", "finished"]
    assert recorder.events[-1].data == {"status": "finished_length_capped"}


def test_a_sink_that_raises_is_switched_off_and_changes_nothing(driver_of: DriverOf) -> None:
    sink, recorder = RaisingSink(), Recorder()
    driver = driver_of(sinks=[sink, recorder])
    requests = [make_request(f"r{i}", [i + 1], 3) for i in range(8)]
    driver.add(*requests)
    driver.run()
    driver.assert_right(*requests)
    assert sink.calls == EventSink.MAX_FAILURES
    assert len(recorder.events) == 8 * 4
