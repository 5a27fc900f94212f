"""The decisions of the default scheduler's policies: what they change, and what they cannot break."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from pegboard.config import EngineConfig
from pegboard.contracts.admission_policy import AdmissionPolicy, Admit, Hold, Skip
from pegboard.contracts.chunk_policy import ChunkPolicy
from pegboard.contracts.preemption_policy import PreemptionPolicy
from pegboard.contracts.scheduler import PauseState
from pegboard.testing.adversaries import Preempts
from pegboard.testing.driver import SchedulerDriver, make_request
from pegboard.testing.fakes import fake_kv_config, hash_model
from pegboard_plugins.scheduling.queues import PriorityQueue

MODEL = hash_model(1000)
DriverOf = Callable[..., SchedulerDriver]


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
    driver.assert_right(*requests)


def test_skipped_requests_keep_their_place(driver_of: DriverOf) -> None:
    driver = driver_of(parts={"admission_policy": SkipEven})
    lengths = (2, 3, 4, 5)
    requests = [make_request(f"r{n}", range(n), 4) for n in lengths]
    driver.add(*requests)
    assert [new.request_id for new in driver.plan().new_requests] == ["r3", "r5"]
    driver.run()
    started = [new.request_id for plan in driver.plans for new in plan.new_requests]
    assert started == ["r3", "r5", "r2", "r4"]
    driver.assert_right(*requests)


def test_a_policy_that_never_admits_cannot_stop_the_engine(driver_of: DriverOf) -> None:
    driver = driver_of(parts={"admission_policy": Never})
    requests = [make_request(f"r{i}", [i + 1], 3) for i in range(3)]
    driver.add(*requests)
    driver.run()
    driver.assert_right(*requests)


class Says(AdmissionPolicy):
    answer: Any = None

    def admit(self, request: Any, context: Any) -> Any:
        return self.answer


def test_nor_can_it_in_a_pause_of_new_requests(driver_of: DriverOf) -> None:
    """Those that had been running go on; the others wait."""
    admission, preemption = Says(), Preempts()
    driver = driver_of(parts={"admission_policy": lambda: admission, "preemption_policy": lambda: preemption})
    old, young, new = (make_request(name, [1], 9) for name in ("old", "young", "new"))
    driver.add(old, young)
    driver.step()
    driver.add(new)
    admission.answer = Hold()
    driver.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    preemption.victim = "young"
    for _ in range(20):
        driver.step()
    assert sorted(driver.finished) == ["old", "young"]
    driver.scheduler.set_pause_state(PauseState.UNPAUSED)
    driver.run()
    driver.assert_right(old, young, new)


class NoChunks(ChunkPolicy):
    def chunk_tokens(self, request: Any, remaining: int, context: Any) -> int:
        return 0


def test_a_policy_that_never_computes_a_prompt_cannot_stop_the_engine(driver_of: DriverOf) -> None:
    driver = driver_of(parts={"chunk_policy": NoChunks})
    requests = [make_request(f"r{i}", range(i + 1, i + 6), 3) for i in range(3)]
    driver.add(*requests)
    driver.run()
    driver.assert_right(*requests)


class OldestCandidate(PreemptionPolicy):
    """Prefers victims that have been planned already in this step."""

    def victims(self, need: Any, candidates: Any, context: Any) -> Any:
        return [c.request_id for c in candidates]

    def mode(self, request: Any) -> Any:
        return "swap"


def test_host_blocks_that_nothing_will_use_are_told(make_scheduler: Any, caplog: Any) -> None:
    config = EngineConfig(model="none", max_model_len=64)
    make_scheduler(config, fake_kv_config(9))
    assert not caplog.records
    make_scheduler(config, fake_kv_config(9, num_host_blocks=4))
    assert "swap_space" in caplog.text


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_victim_may_have_been_planned_already(driver_of: DriverOf, depth: int) -> None:
    driver = driver_of(14, 4, depth=depth, parts={"preemption_policy": OldestCandidate})
    requests = [make_request(f"r{i}", [i, *range(6 - i)], 25) for i in range(6)]
    driver.add(*requests)
    driver.run()
    assert driver.scheduler.stats().num_preemptions > 3
    assert driver.last["r0"].num_preemptions == 0, "the oldest is never a victim"
    driver.assert_right(*requests)


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
    driver.assert_right(*requests)


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
    driver.assert_right(*requests)


def test_victims_are_the_least_urgent_and_resume_last(driver_of: DriverOf) -> None:
    driver = driver_of(12, 4, parts={"request_queue": PriorityQueue})
    requests = [make_request(f"r{i}", [i + 1] * 4, 30, priority=i) for i in range(4)]
    driver.add(*reversed(requests))
    driver.run()
    assert list(driver.finished) == ["r0", "r1", "r2", "r3"]
    assert driver.last["r0"].num_preemptions == 0
    driver.assert_right(*requests)


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
    driver.assert_right(*requests)
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
