"""Members that wait for a prompt keep a slot each: the prompt is computed once, and passing over them costs little."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest

from pegboard.contracts.views import RequestView
from pegboard.testing.driver import SchedulerDriver, make_group, make_request
from pegboard.wire import SchedulerOutput
from pegboard_plugins.scheduling.queues import FCFSQueue

DriverOf = Callable[..., SchedulerDriver]
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
CACHES = pytest.mark.parametrize("allocator", ["paged", "prefix"])


def entered(plan: SchedulerOutput) -> list[str]:
    return [new.request_id for new in plan.new_requests]


def test_nobody_behind_them_takes_their_slots(driver_of: DriverOf) -> None:
    driver = driver_of(max_num_seqs=4, max_num_batched_tokens=16, long_prefill_token_threshold=8)
    group, others = make_group("g", range(20), 3), [make_request(f"other{i}", [i], 9) for i in range(2)]
    driver.add(*group, *others)
    assert entered(driver.plan()) == ["g/0", "other0"], "of four slots two are kept"
    driver.book()
    assert entered(driver.plan()) == []
    driver.book()
    assert entered(driver.plan()) == ["g/1", "g/2"]
    driver.run()
    driver.assert_right(*group, *others)


def test_those_in_front_of_them_go_first(driver_of: DriverOf) -> None:
    driver = driver_of(max_num_seqs=3, max_num_batched_tokens=16, long_prefill_token_threshold=8)
    group, other = make_group("g", range(20), 3), make_request("other", [1], 9)
    driver.add(group[0])
    driver.step()
    driver.add(other, *group[1:])
    assert entered(driver.plan()) == ["other"]
    driver.run()
    driver.assert_right(*group, other)


@DEPTHS
@CACHES
@pytest.mark.parametrize("threshold", [0, 3, 20])
def test_every_prompt_is_computed_once(driver_of: DriverOf, threshold: int, allocator: str, depth: int) -> None:
    """More groups than slots, each with as many members; without kept slots the first members of all groups take all slots, and
    end before the others start."""
    driver = driver_of(
        400, depth=depth, allocator=allocator, max_num_seqs=12, max_num_batched_tokens=40, long_prefill_token_threshold=threshold
    )
    groups = [make_group(f"g{i}", [i, *range(40)], 4, 3) for i in range(12)]
    members = [request for group in groups for request in group]
    driver.add(*members)
    driver.run()
    driver.assert_right(*members)
    assert driver.scheduler.stats().num_scheduled_tokens == 12 * 41 + 12 * 4 * 2, "the prompts, and two tokens of each answer"


class CountingQueue(FCFSQueue):
    peeks: ClassVar[int] = 0

    def peek(self) -> RequestView | None:
        CountingQueue.peeks += 1
        return super().peek()


def test_a_step_looks_at_no_more_of_them_than_there_are_slots(driver_of: DriverOf) -> None:
    driver = driver_of(
        parts={"request_queue": CountingQueue}, max_num_seqs=8, max_num_batched_tokens=64, long_prefill_token_threshold=2
    )
    driver.check = False
    group, other = make_group("g", range(20), 500, 2), make_request("other", [1], 2)
    driver.add(*group, other)
    for _ in range(9):
        before = CountingQueue.peeks
        driver.step()
        assert CountingQueue.peeks - before <= 3 * 8
    driver.abort([request.request_id for request in group])
    driver.run()
    driver.assert_right(other)
