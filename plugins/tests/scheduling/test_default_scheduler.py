"""What the default scheduler adds to the contract: its policies, drafts, pipelines, events and the wire format."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from pegboard.config import EngineConfig, ExecutorConfig, KVCacheSettings, SchedulerConfig
from pegboard.contracts.admission_policy import AdmissionPolicy, Admit, Hold, Skip
from pegboard.contracts.chunk_policy import ChunkPolicy
from pegboard.contracts.event_sink import Event, EventSink
from pegboard.contracts.preemption_policy import PreemptionPolicy
from pegboard.testing.adversaries import RaisingSink
from pegboard.testing.driver import SchedulerDriver, expected_output, make_request
from pegboard.testing.fakes import FakeRunner, fake_kv_config, hash_model
from pegboard.testing.mirror import MirrorWorker
from pegboard.wire import FinishReason, Logprobs, ModelRunnerOutput, SchedulerOutput
from pegboard_plugins.scheduling.queues import PriorityQueue
from pegboard_plugins.scheduling.scheduler import DefaultScheduler

MODEL = hash_model(1000)
DriverOf = Callable[..., SchedulerDriver]


@pytest.fixture
def driver_of(make_scheduler: Callable[..., DefaultScheduler]) -> DriverOf:
    def make(
        usable_blocks: int = 100,
        block_size: int = 4,
        *,
        depth: int = 1,
        stages: int = 1,
        parts: Mapping[str, Callable[..., Any]] | None = None,
        sinks: Sequence[EventSink] = (),
        propose: Callable[[Sequence[int]], list[int]] | None = None,
        groups: int = 1,
        **limits: Any,
    ) -> SchedulerDriver:
        config = EngineConfig(
            model="none",
            max_model_len=4096,
            executor=ExecutorConfig(pipeline_parallel_size=stages),
            scheduler=SchedulerConfig(**limits),
            kv_cache=KVCacheSettings(block_size=block_size),
        )
        kv_config = fake_kv_config(usable_blocks + 1, block_size, num_groups=groups)
        scheduler = make_scheduler(config, kv_config, parts, event_sinks=sinks)
        mirror = MirrorWorker(
            kv_config,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            keeps_samples=stages == 1,
        )
        return SchedulerDriver(scheduler, FakeRunner(mirror, MODEL, propose), depth)

    return make


def assert_right(driver: SchedulerDriver, *requests: Any) -> None:
    for request in requests:
        tokens, reason = expected_output(request, MODEL)
        assert (driver.tokens[request.request_id], driver.finished[request.request_id]) == (tokens, reason)
    assert driver.scheduler.stats().kv_usage == 0.0


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


class SmallFirst(ChunkPolicy):
    def chunk_tokens(self, request: Any, remaining: int, context: Any) -> int | None:
        return 4 if context.step == 1 else None


def test_an_older_prefill_leaves_a_token_to_each_request_behind_it(driver_of: DriverOf) -> None:
    driver = driver_of(max_num_batched_tokens=10, parts={"chunk_policy": SmallFirst})
    driver.add(make_request("a", range(60), 3), make_request("b", [1, 2], 9), make_request("c", [3], 9))
    assert driver.plan().num_scheduled_tokens == [4, 2, 1]
    driver.book()
    for _ in range(5):
        assert driver.plan().num_scheduled_tokens == [8, 1, 1]
        driver.book()


def test_a_slot_is_told_free_and_given_again_in_one_plan(driver_of: DriverOf) -> None:
    driver = driver_of(max_num_seqs=1)
    requests = [make_request(f"r{i}", [i + 1], 2) for i in range(3)]
    driver.add(*requests)
    driver.run()
    assert_right(driver, *requests)
    reused = [plan for plan in driver.plans if plan.new_requests and plan.finished_slots == [0]]
    assert [plan.new_requests[0].slot for plan in reused] == [0, 0]


def test_two_groups_of_layers_take_blocks_from_one_pool(driver_of: DriverOf) -> None:
    driver = driver_of(21, 4, groups=2)
    requests = [make_request(f"r{i}", range(i, i + 10), 20) for i in range(4)]
    driver.add(*requests)
    driver.run()
    assert driver.scheduler.stats().num_preemptions > 0
    assert_right(driver, *requests)


# -- policies ----------------------------------------------------------------------------------------------------------


class OneAtATime(AdmissionPolicy):
    def admit(self, request: Any, context: Any) -> Any:
        return Hold() if context.num_running else Admit(max_tokens=3)


class SkipEven(AdmissionPolicy):
    def admit(self, request: Any, context: Any) -> Any:
        return Skip() if request.num_prompt_tokens % 2 == 0 else None


class Never(AdmissionPolicy):
    def admit(self, request: Any, context: Any) -> Any:
        return Hold("never")


def test_hold_and_the_cap_of_the_first_chunk(driver_of: DriverOf) -> None:
    driver = driver_of(parts={"admission_policy": OneAtATime})
    requests = [make_request(f"r{i}", range(i, i + 8), 3) for i in range(3)]
    driver.add(*requests)
    plan = driver.plan()
    assert plan.num_scheduled_tokens == [3]
    driver.run()
    assert max(len(plan.slots) for plan in driver.plans) == 1
    assert_right(driver, *requests)


def test_skipped_requests_keep_their_place(driver_of: DriverOf) -> None:
    driver = driver_of(parts={"admission_policy": SkipEven})
    lengths = (2, 3, 4, 5)
    requests = [make_request(f"r{n}", range(n), 4) for n in lengths]
    driver.add(*requests)
    assert [new.request_id for new in driver.plan().new_requests] == ["r3", "r5"]
    driver.run()
    started = [new.request_id for plan in driver.plans for new in plan.new_requests]
    assert started == ["r3", "r5", "r2", "r4"]
    assert_right(driver, *requests)


def test_a_policy_that_never_admits_cannot_stop_the_engine(driver_of: DriverOf) -> None:
    driver = driver_of(parts={"admission_policy": Never})
    requests = [make_request(f"r{i}", [i + 1], 3) for i in range(3)]
    driver.add(*requests)
    driver.run()
    assert_right(driver, *requests)


class NoChunks(ChunkPolicy):
    def chunk_tokens(self, request: Any, remaining: int, context: Any) -> int:
        return 0


def test_a_policy_that_never_computes_a_prompt_cannot_stop_the_engine(driver_of: DriverOf) -> None:
    driver = driver_of(parts={"chunk_policy": NoChunks})
    requests = [make_request(f"r{i}", range(i + 1, i + 6), 3) for i in range(3)]
    driver.add(*requests)
    driver.run()
    assert_right(driver, *requests)


class OldestCandidate(PreemptionPolicy):
    """Prefers victims that have been planned already in this step."""

    def victims(self, need: Any, candidates: Any, context: Any) -> Any:
        return [c.request_id for c in candidates]

    def mode(self, request: Any) -> Any:
        return "swap"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_victim_may_have_been_planned_already(driver_of: DriverOf, depth: int) -> None:
    driver = driver_of(14, 4, depth=depth, parts={"preemption_policy": OldestCandidate})
    requests = [make_request(f"r{i}", [i, *range(6 - i)], 25) for i in range(6)]
    driver.add(*requests)
    driver.run()
    assert driver.scheduler.stats().num_preemptions > 3
    assert driver.last["r0"].num_preemptions == 0, "the oldest is never a victim"
    assert_right(driver, *requests)


class AdmitAll(AdmissionPolicy):
    def admit(self, request: Any, context: Any) -> Any:
        return None


def test_a_victim_s_planned_tokens_go_back_to_the_budget(driver_of: DriverOf) -> None:
    driver = driver_of(4, 4, parts={"preemption_policy": OldestCandidate, "admission_policy": AdmitAll})
    driver.add(*(make_request(f"r{i}", [i] * (4 if i == 2 else 1), 3) for i in range(4)))
    driver.step()
    driver.scheduler.planner.max_num_batched_tokens = 3  # type: ignore[attr-defined]
    plan = driver.plan()  # r2 needs a block; r1, planned before it, gives way
    assert plan.preempted_slots == [1]
    assert plan.slots == [0, 2, 3]


def test_victims_of_one_step_wait_in_order_of_arrival(driver_of: DriverOf) -> None:
    driver = driver_of(6, 4, parts={"preemption_policy": OldestCandidate, "admission_policy": AdmitAll})
    driver.add(
        make_request("r0", [0] * 4, 12), *(make_request(f"r{i}", [i], 12) for i in range(1, 4)), make_request("r4", [4] * 8, 9)
    )
    driver.step()
    assert len(driver.plan().preempted_slots) == 2, "r0 and r4 need a block each"
    driver.book()
    while not driver.plans[-1].new_requests:
        driver.step()
    assert [new.request_id for new in driver.plans[-1].new_requests] == ["r1", "r2"]


class FourThenNone(ChunkPolicy):
    def chunk_tokens(self, request: Any, remaining: int, context: Any) -> int:
        return 4 if context.step == 1 else 0


def test_a_request_that_was_put_off_and_then_preempted_is_not_planned(driver_of: DriverOf) -> None:
    parts = {"preemption_policy": OldestCandidate, "admission_policy": AdmitAll, "chunk_policy": FourThenNone}
    driver = driver_of(4, 4, depth=3, parts=parts)
    requests = [make_request("r0", [1], 2), make_request("r1", range(8), 5), make_request("r2", [2, 3, 4], 5)]
    driver.add(*requests)
    driver.plan()
    driver.plan()
    plan = driver.plan()  # r0 waits for its last token, r1 is put off and gives way to r2, whose block is not free yet
    assert (plan.slots, plan.preempted_slots) == ([], [1])
    driver.run()
    assert_right(driver, *requests)


class PreemptOften(PreemptionPolicy):
    def victims(self, need: Any, candidates: Any, context: Any) -> Any:
        return None

    def proactive(self, candidates: Any, context: Any) -> Any:
        return [candidates[0].request_id] if context.step % 4 == 0 else []


@pytest.mark.parametrize("depth", [1, 3])
def test_proactive_preemption(driver_of: DriverOf, depth: int) -> None:
    driver = driver_of(depth=depth, parts={"preemption_policy": PreemptOften})
    requests = [make_request(f"r{i}", [i + 1, i], 12) for i in range(3)]
    driver.add(*requests)
    driver.run()
    assert driver.scheduler.stats().num_preemptions > 2
    assert driver.last["r0"].num_preemptions == 0
    assert not any(plan.preempted_slots and plan.new_requests for plan in driver.plans), "nobody starts in a step that preempts"
    assert_right(driver, *requests)


def test_victims_are_the_least_urgent_and_resume_last(driver_of: DriverOf) -> None:
    driver = driver_of(12, 4, parts={"request_queue": PriorityQueue})
    requests = [make_request(f"r{i}", [i + 1] * 4, 30, priority=i) for i in range(4)]
    driver.add(*reversed(requests))
    driver.run()
    assert list(driver.finished) == ["r0", "r1", "r2", "r3"]
    assert driver.last["r0"].num_preemptions == 0
    assert_right(driver, *requests)


class Raises(ChunkPolicy):
    def chunk_tokens(self, request: Any, remaining: int, context: Any) -> int:
        raise ZeroDivisionError("no chunk")


class Nonsense(PreemptionPolicy):
    def victims(self, need: Any, candidates: Any, context: Any) -> Any:
        return "r1"


def test_a_policy_that_fails_is_replaced_logged_once_and_reported(driver_of: DriverOf, caplog: Any) -> None:
    driver = driver_of(14, 4, parts={"chunk_policy": Raises, "preemption_policy": Nonsense})
    requests = [make_request(f"r{i}", [i, *range(6)], 20) for i in range(6)]
    driver.add(*requests)
    with caplog.at_level(logging.ERROR):
        driver.run()
    assert_right(driver, *requests)
    degraded = driver.scheduler.stats().degraded
    assert len(degraded) == 2
    assert any("Raises: chunk_tokens raised ZeroDivisionError: no chunk" in message for message in degraded)
    assert any("Nonsense: victims returned 'r1'" in message for message in degraded)
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("kind", "policy", "error"), [("chunk_policy", Raises, ZeroDivisionError), ("preemption_policy", Nonsense, TypeError)]
)
def test_strict_lets_the_error_through(driver_of: DriverOf, kind: str, policy: Any, error: type[Exception]) -> None:
    driver = driver_of(14, 4, parts={kind: policy}, strict=True)
    driver.add(*(make_request(f"r{i}", [i, *range(6)], 20) for i in range(6)))
    with pytest.raises(error):
        driver.run()


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
    assert_right(driver, *requests)
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
    assert_right(driver, *requests)


# -- pipelines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_with_pipeline_stages_tokens_travel_in_the_plan(driver_of: DriverOf, depth: int) -> None:
    driver = driver_of(20, 4, depth=depth, stages=2, max_num_batched_tokens=12)
    requests = [make_request(f"r{i}", range(i, i + 7), 12) for i in range(6)]
    driver.add(*requests)
    driver.run()
    assert driver.scheduler.stats().num_preemptions > 0
    assert any(plan.token_slots for plan in driver.plans)
    assert_right(driver, *requests)


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
    assert_right(driver, *requests)
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
    assert_right(driver, *requests)
    assert sink.calls == EventSink.MAX_FAILURES
    assert len(recorder.events) == 8 * 4
