"""Layers with sliding windows: what is behind them goes back to the pool, and nothing that somebody reads or writes does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pegboard.testing.driver import SchedulerDriver, make_group, make_request
from pegboard.wire.kv_cache import blocks_needed, window_blocks

BLOCK = 4
MIXED = (None, 9)
KINDS = pytest.mark.parametrize("windows", [(9,), MIXED, (5, None, 17)], ids=str)
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
DriverOf = Callable[..., SchedulerDriver]


def held(driver: SchedulerDriver) -> int:
    kv: Any = driver.scheduler.kv  # type: ignore[attr-defined]
    return kv.num_usable_blocks - kv.allocator.num_free  # type: ignore[no-any-return]


@KINDS
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_request_never_holds_more_than_is_counted(driver_of: DriverOf, windows: tuple[int | None, ...], chunk: int) -> None:
    driver = driver_of(200, BLOCK, windows=windows, max_num_batched_tokens=chunk, max_num_seqs=1)
    request = make_request("r", range(100), 60)
    driver.add(request)
    most, lasts = blocks_needed(160, windows, BLOCK, chunk), []
    while "r" not in driver.finished:
        driver.step()
        assert held(driver) <= most
        lasts.append(held(driver))
    assert max(lasts[-20:]) <= blocks_needed(160, windows, BLOCK, 1), "a token at a time needs the windows alone"
    driver.assert_right(request)
    passed = sum((160 - w) // BLOCK - 1 for w in windows if w is not None)
    assert passed <= driver.scheduler.stats().num_passed_blocks <= passed + 3 * len(windows)


@KINDS
@DEPTHS
@pytest.mark.parametrize("allocator", ["paged", "prefix"])
def test_the_longest_request_runs_in_the_smallest_pool(
    driver_of: DriverOf, windows: tuple[int | None, ...], depth: int, allocator: str
) -> None:
    """With steps in flight it waits for them, whose end frees the blocks that it needs."""
    pool = blocks_needed(150, windows, BLOCK, 8)
    driver = driver_of(pool, BLOCK, windows=windows, depth=depth, allocator=allocator, max_num_batched_tokens=8)
    requests = [make_request("long", range(110), 40), make_request("other", range(5, 60), 30)]
    driver.add(*requests)
    driver.run()
    driver.assert_right(*requests)
    if None in windows:
        with pytest.raises(ValueError, match="the KV cache holds"):
            driver.add(make_request("longer", range(150 + 2 * BLOCK), 1))


@DEPTHS
@pytest.mark.parametrize("allocator", ["paged", "prefix"])
def test_preempted_requests_come_back(driver_of: DriverOf, depth: int, allocator: str) -> None:
    driver = driver_of(40, BLOCK, windows=MIXED, depth=depth, allocator=allocator, max_num_batched_tokens=16, max_num_seqs=8)
    requests = [make_request(f"r{i}", range(i, i + 30), 40) for i in range(8)]
    driver.add(*requests)
    driver.run()
    driver.assert_right(*requests)
    assert driver.scheduler.stats().num_preemptions > 0, "the pool is too large for this test"


@pytest.mark.parametrize("windows", [(8,), (9,), MIXED], ids=str)
@pytest.mark.parametrize("depth", [2, 3])
def test_steps_in_flight_preempt_nobody_who_has_room_without_them(
    driver_of: DriverOf, windows: tuple[int | None, ...], depth: int
) -> None:
    """What they leave behind windows is waited for."""

    def run(pool: int, depth: int) -> tuple[SchedulerDriver, int]:
        driver = driver_of(pool, BLOCK, windows=windows, depth=depth, allocator="paged", max_num_batched_tokens=8)
        requests = [make_request(f"r{i}", range(i, i + 10), 90) for i in range(2)]
        driver.add(*requests)
        most = 0
        while len(driver.finished) < len(requests):
            driver.step()
            most = max(most, held(driver))
        driver.assert_right(*requests)
        return driver, most

    _, most = run(200, 1)
    assert run(most, 1)[0].scheduler.stats().num_preemptions == 0
    driver, _ = run(most, depth)
    assert driver.scheduler.stats().num_preemptions == 0


def test_a_prompt_that_was_computed_is_found_behind_its_windows(driver_of: DriverOf) -> None:
    driver = driver_of(200, BLOCK, windows=MIXED)
    first = make_request("first", range(50), 30)
    driver.add(first)
    driver.run()
    again, longer = make_request("again", range(50), 5), make_request("longer", [*range(50), *driver.tokens["first"][:20], 7], 5)
    driver.add(again, longer)
    driver.run()
    assert [driver.last[name].num_cached_tokens for name in ("again", "longer")] == [48, 68]
    driver.assert_right(first, again, longer)


def test_logprobs_of_a_prompt_need_a_prefix_that_ends_before(driver_of: DriverOf) -> None:
    """A prefix cut shorter would lack what the earlier token looks at: it is looked up as a shorter one."""
    driver = driver_of(60, BLOCK, windows=MIXED, max_num_batched_tokens=8, max_num_seqs=4)
    warm = make_request("warm", range(50), 1)
    driver.add(warm)
    driver.run()
    requests = [make_request(f"r{i}", range(50), 30, prompt_logprobs=True) for i in range(3)]
    driver.add(*requests)
    driver.run()
    driver.assert_right(warm, *requests)
    assert driver.scheduler.stats().num_preemptions > 0, "the pool is too large for this test"


@DEPTHS
def test_answers_that_start_when_the_prompt_is_out_of_sight_compute_it(driver_of: DriverOf, depth: int) -> None:
    driver = driver_of(200, BLOCK, windows=MIXED, depth=depth, allocator="paged", max_num_seqs=2)
    lengths = [60, 25, 10, 10]
    requests = [make_request(f"g/{i}", range(31), n, group="g", variant=i) for i, n in enumerate(lengths)]
    driver.add(*requests)
    driver.run()
    driver.assert_right(*requests)
    entered = [(new.num_computed_tokens, plan.step_id) for plan in driver.plans for new in plan.new_requests]
    assert [computed for computed, _ in entered] == [0, 31, 0, 0], (
        "beside the first one, or behind it when its window has gone on"
    )
    assert entered[-1][1] < 60, "they do not wait for the first one's end"


def test_answers_that_start_in_time_share_the_prompt(driver_of: DriverOf) -> None:
    driver = driver_of(200, BLOCK, windows=(None, 40), allocator="paged", max_num_seqs=3)
    requests = [*make_group("g", range(31), 3, 8), make_request("brief", range(40, 50), 4)]
    driver.add(requests[3], *requests[:3])
    driver.run()
    driver.assert_right(*requests)
    computed = [new.num_computed_tokens for plan in driver.plans for new in plan.new_requests]
    assert sorted(computed) == [0, 0, 30, 31]


@pytest.mark.parametrize("window", [1, 2, 6])
def test_drafts_that_are_rejected_take_no_window_along(driver_of: DriverOf, window: int) -> None:
    """Every second draft is wrong."""

    def propose(token_ids: Any) -> list[int]:
        tokens = list(token_ids)
        for wrong in (0, 1, 0):
            tokens.append(driver.runner.next_token(tokens) + wrong)
        return tokens[len(token_ids) :]

    driver = driver_of(100, BLOCK, windows=(None, window), propose=propose)
    requests = [make_request(f"r{i}", range(i, i + 20), 40) for i in range(3)]
    driver.add(*requests)
    driver.run()
    driver.assert_right(*requests)
    assert any(plan.spec_slots for plan in driver.plans)
    assert driver.scheduler.stats().num_passed_blocks > 3 * 8


def test_a_window_of_its_own_needs_no_more_for_longer_requests(driver_of: DriverOf) -> None:
    bound = window_blocks(9, BLOCK, 8)
    driver = driver_of(bound, BLOCK, windows=(9,), max_num_batched_tokens=8)
    request = make_request("r", range(900), 100)
    driver.add(request)
    driver.run()
    driver.assert_right(request)
