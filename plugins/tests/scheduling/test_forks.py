"""The copies of forks: in the plan after, for those that are still there, and of blocks that hold what is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pegboard.contracts.admission_policy import AdmissionPolicy, Admit
from pegboard.contracts.scheduler import PauseState
from pegboard.testing.adversaries import Preempts
from pegboard.testing.driver import SchedulerDriver, make_group, make_request
from pegboard.wire import SchedulerOutput

DriverOf = Callable[..., SchedulerDriver]
CACHES = pytest.mark.parametrize("allocator", ["paged", "prefix"])


class NoReserve(AdmissionPolicy):
    def admit(self, request: Any, context: Any) -> Any:
        return Admit()


def forked(driver: SchedulerDriver) -> SchedulerOutput:
    """Step until a plan forks; its result is outstanding."""
    while True:
        plan = driver.plan()
        if plan.fork_slots:
            return plan
        driver.book()


@CACHES
@pytest.mark.parametrize("booked", [False, True])
def test_a_source_that_is_aborted_in_the_step_that_forks(driver_of: DriverOf, booked: bool, allocator: str) -> None:
    """Its partial block may be somebody else's in the plan that copies it: copies come first."""
    driver = driver_of(8, 4, depth=2, allocator=allocator, parts={"admission_policy": NoReserve})
    group = make_group("g", range(6), 3, 5)
    driver.add(*group)
    plan = forked(driver)
    (_, partial), child, other = (new.block_ids[0] for new in plan.new_requests)
    if booked:
        driver.book()
    driver.abort(["g/0"])
    newcomer = make_request("new", range(50, 56), 3)
    driver.add(newcomer)
    plan = driver.plan()
    assert plan.block_copies == [(partial, child[1]), (partial, other[1])]
    assert (partial in plan.new_requests[0].block_ids[0]) == booked
    driver.run()
    driver.assert_right(*group[1:], newcomer)


@CACHES
@pytest.mark.parametrize("booked", [False, True])
def test_a_child_that_is_aborted_before_its_copy(driver_of: DriverOf, booked: bool, allocator: str) -> None:
    driver = driver_of(8, 4, depth=2, allocator=allocator, parts={"admission_policy": NoReserve})
    group = make_group("g", range(6), 3, 5)
    driver.add(*group)
    plan = forked(driver)
    (_, partial), child, other = (new.block_ids[0] for new in plan.new_requests)
    if booked:
        driver.book()
    driver.abort(["g/1"])
    newcomer = make_request("new", range(50, 56), 3)
    driver.add(newcomer)
    plan = driver.plan()
    assert plan.block_copies == [(partial, other[1])]
    assert (child[1] in plan.new_requests[0].block_ids[0]) == booked
    driver.run()
    driver.assert_right(group[0], group[2], newcomer)


def test_a_child_that_is_preempted_in_the_plan_of_its_copy(driver_of: DriverOf) -> None:
    policy = Preempts()
    driver = driver_of(parts={"preemption_policy": lambda: policy})
    group = make_group("g", range(6), 3, 5)
    driver.add(*group)
    plan = forked(driver)
    (_, partial), _, other = (new.block_ids[0] for new in plan.new_requests)
    driver.book()
    policy.victim = "g/1"
    plan = driver.plan()
    assert (plan.preempted_slots, plan.block_copies) == ([1], [(partial, other[1])])
    driver.run()
    driver.assert_right(*group)


def test_a_source_that_is_preempted_in_the_plan_of_the_copies(driver_of: DriverOf) -> None:
    """Another one grows into its partial block in the same plan."""
    policy = Preempts()
    driver = driver_of(8, 4, parts={"preemption_policy": lambda: policy, "admission_policy": NoReserve})
    old, group = make_request("old", range(20, 27), 12), make_group("g", range(6), 3, 5)
    driver.add(old)
    driver.step()
    driver.add(*group)
    plan = forked(driver)
    (_, partial), child, other = (new.block_ids[0] for new in plan.new_requests)
    driver.book()
    policy.victim = "g/0"
    plan = driver.plan()
    assert plan.block_copies == [(partial, child[1]), (partial, other[1])]
    assert plan.block_ids == [[[partial]]]
    driver.run()
    driver.assert_right(old, *group)


def test_copies_are_sent_when_nothing_else_is(driver_of: DriverOf) -> None:
    driver = driver_of()
    group = make_group("g", range(6), 3, 5)
    driver.add(*group)
    driver.step()
    driver.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    plan = driver.plan()
    assert plan.empty
    assert plan.has_state_changes
    assert len(plan.block_copies) == 2
    assert not driver.plan().has_state_changes
    driver.scheduler.set_pause_state(PauseState.UNPAUSED)
    driver.run()
    driver.assert_right(*group)


def test_a_block_that_a_copy_still_reads_is_not_copied_to(driver_of: DriverOf) -> None:
    """The source of the first group ends with its first token. Its partial block is the next one to be handed out, while the
    copy from it is due: the fork of the second group waits for one plan."""
    driver = driver_of(30, 8, max_num_seqs=3, parts={"admission_policy": NoReserve})
    second = make_group("b", range(20, 30), 2, 20)
    first = [make_request(f"a/{i}", range(10), 1 + 9 * i, group="a", variant=i) for i in range(2)]
    driver.add(second[0])
    driver.step()
    driver.add(*first)
    plan = driver.plan()
    assert len(plan.fork_slots) == 1
    partial = plan.new_requests[0].block_ids[0][1]
    driver.add(second[1])
    driver.book()
    assert "a/0" in driver.finished
    plan = driver.plan()
    assert [source for source, _ in plan.block_copies] == [partial]
    assert plan.new_requests == []
    driver.book()
    plan = driver.plan()
    assert [(new.request_id, new.num_computed_tokens) for new in plan.new_requests] == [("b/1", 9)]
    assert [destination for _, destination in plan.block_copies] == [partial]
    driver.run()
    driver.assert_right(*first, *second)


def test_nobody_is_forked_from_a_child_whose_copy_is_due(driver_of: DriverOf) -> None:
    driver = driver_of(30, 4, max_num_seqs=2)
    group = [make_request(f"g/{i}", range(6), 1 if i == 0 else 9, group="g", variant=i) for i in range(3)]
    driver.add(*group)
    driver.step()
    assert "g/0" in driver.finished
    plan = driver.plan()
    assert (len(plan.block_copies), plan.new_requests) == (1, [])
    driver.book()
    plan = driver.plan()
    assert [(new.request_id, new.num_computed_tokens) for new in plan.new_requests] == [("g/2", 5)]
    driver.run()
    driver.assert_right(*group)
