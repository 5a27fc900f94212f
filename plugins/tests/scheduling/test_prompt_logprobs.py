"""Prompt logprobs in the default scheduler: what is computed for them, and how they are put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pegboard.testing.adversaries import Preempts
from pegboard.testing.driver import SchedulerDriver, make_group, make_request
from pegboard.testing.fakes import fake_prompt_logprobs
from pegboard.wire import EngineCoreOutput, Logprobs, ModelRunnerOutput
from pegboard_plugins.scheduling.prompt_logprobs import collect
from pegboard_plugins.scheduling.request import Request

DriverOf = Callable[..., SchedulerDriver]
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


def entries_of(prompt: Sequence[int], first: int, end: int) -> list[Logprobs]:
    """Of tokens ``first`` to before ``end``."""
    return fake_prompt_logprobs(prompt)[first - 1 : end - 1]


@DEPTHS
def test_a_cached_prompt_is_computed_again_and_shared_with_others(driver_of: DriverOf, depth: int) -> None:
    driver = driver_of(depth=depth)
    driver.add(make_request("before", range(10), 1))
    driver.run()
    wants, other = make_request("wants", range(14), 5, prompt_logprobs=True), make_request("other", range(14), 5)
    driver.add(wants, other)
    assert [new.num_computed_tokens for new in driver.plan().new_requests] == [0, 12]
    driver.run()
    driver.assert_right(wants, other)
    assert [driver.last[name].num_cached_tokens for name in ("wants", "other")] == [0, 12]


@pytest.mark.parametrize(("num_steps", "hit"), [(1, 4), (2, 12), (3, 16)])
def test_a_hit_goes_as_far_as_the_entries_that_are_there(driver_of: DriverOf, num_steps: int, hit: int) -> None:
    """Chunks of 6 tokens, blocks of 4: entries of tokens 1 to 6, 12 and 18 are there, the blocks of the whole prompt too."""
    policy = Preempts()
    driver = driver_of(parts={"preemption_policy": lambda: policy}, max_num_batched_tokens=7)
    driver.add(make_request("before", range(30), 1))
    driver.run()
    old, wants = make_request("old", [99], 40), make_request("wants", range(30), 5, prompt_logprobs=True)
    driver.add(old)
    driver.step()
    driver.add(wants)
    for _ in range(num_steps):
        driver.step()
    policy.victim = "wants"
    driver.step()
    plan = driver.plan()
    assert [(new.request_id, new.num_computed_tokens) for new in plan.new_requests] == [("wants", hit)]
    driver.run()
    driver.assert_right(old, wants)


@DEPTHS
@pytest.mark.parametrize("num_steps", range(6))
def test_preempted_at_any_time_they_are_reported_once(driver_of: DriverOf, num_steps: int, depth: int) -> None:
    policy = Preempts()
    driver = driver_of(parts={"preemption_policy": lambda: policy}, max_num_batched_tokens=6, depth=depth)
    old, wants = make_request("old", [99], 40), make_request("wants", range(11), 9, prompt_logprobs=True)
    driver.add(old, wants)
    for _ in range(num_steps):
        driver.step()
    policy.victim = "wants"
    driver.run()
    driver.assert_right(old, wants)
    assert driver.last["wants"].num_preemptions == 1


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_a_request_that_comes_back_asks_for_them_only_if_some_are_missing(driver_of: DriverOf, num_steps: int) -> None:
    """Its prompt is computed in two steps."""
    policy = Preempts()
    driver = driver_of(parts={"preemption_policy": lambda: policy}, max_num_batched_tokens=7)
    old, wants = make_request("old", [99], 40), make_request("wants", range(11), 9, prompt_logprobs=True)
    driver.add(old, wants)
    for _ in range(num_steps):
        driver.step()
    policy.victim = "wants"
    driver.run()
    driver.assert_right(old, wants)
    asked = [new.sampling.prompt_logprobs for plan in driver.plans for new in plan.new_requests if new.request_id == "wants"]
    assert asked == [0, 0 if num_steps == 1 else None]


def test_the_last_chunk_may_have_none(driver_of: DriverOf) -> None:
    driver = driver_of(max_num_batched_tokens=5)
    wants = make_request("wants", range(6), 5, prompt_logprobs=True)
    driver.add(wants)
    assert driver.step() == []
    (message,) = driver.step()
    assert message.prompt_logprobs == fake_prompt_logprobs(range(6))
    (message,) = driver.step()
    assert message.prompt_logprobs == []
    driver.run()
    driver.assert_right(wants)


def test_one_answer_s_wish_keeps_nobody_else_from_sharing(driver_of: DriverOf) -> None:
    driver = driver_of()
    group = make_group("g", range(14), 4, prompt_logprobs=True)
    driver.add(*group)
    assert driver.plan().num_scheduled_tokens == [14, 0, 0, 0]
    driver.run()
    driver.assert_right(*group)


def test_the_answer_that_wants_them_computes_for_itself_where_another_one_is_first(driver_of: DriverOf) -> None:
    driver = driver_of()
    group = make_group("g", range(14), 4, prompt_logprobs=True)
    driver.add(*group[1:3], group[0], group[3])
    plan = driver.plan()
    assert [new.request_id for new in plan.new_requests] == ["g/1", "g/2", "g/0", "g/3"]
    assert plan.num_scheduled_tokens == [14, 0, 14, 0]
    driver.run()
    driver.assert_right(*group)


def play(driver: SchedulerDriver, *answers: list[Logprobs]) -> list[EngineCoreOutput]:
    """Answer one plan after another for the only request, whose prompt is ``range(10)``."""
    messages: list[EngineCoreOutput] = []
    for entries in answers:
        plan = driver.scheduler.schedule()
        tokens = [[5]] if plan.num_to_sample[0] else [[]]
        output = ModelRunnerOutput(
            step_id=plan.step_id, slots=plan.slots, sampled_token_ids=tokens, prompt_logprobs={0: entries} if entries else {}
        )
        messages += driver.scheduler.update_from_output(plan, output)
    return messages


def test_chunks_are_put_together(driver_of: DriverOf) -> None:
    driver = driver_of(max_num_batched_tokens=4)
    driver.scheduler.add_request(make_request("r", range(10), prompt_logprobs=True))
    chunks = [entries_of(range(10), first, end) for first, end in ((1, 5), (5, 9), (9, 10))]
    (message,) = play(driver, *chunks)
    assert message.prompt_logprobs == fake_prompt_logprobs(range(10))
    driver.scheduler.check_integrity()


@pytest.mark.parametrize("end", [4, 6])
def test_a_chunk_with_too_few_or_too_many(driver_of: DriverOf, end: int) -> None:
    driver = driver_of(max_num_batched_tokens=4)
    driver.scheduler.add_request(make_request("r", range(10), prompt_logprobs=True))
    with pytest.raises(RuntimeError, match=rf"step 1: .* {end - 1} prompt logprobs for request 'r'.* tokens 1 to 4; 0 are there"):
        play(driver, entries_of(range(10), 1, end))


def test_a_chunk_that_was_computed_again_brings_nothing_new() -> None:
    request = Request(make_request("r", range(10), prompt_logprobs=True), 1, 20)
    for computed, count in ((0, 4), (0, 6), (4, 2), (2, 8)):
        collect(request, 1, computed, count, entries_of(range(10), computed + 1, min(computed + count, 9) + 1))
    assert request.prompt_logprobs == fake_prompt_logprobs(range(10))
    assert not request.lacks_entries
    collect(request, 1, 0, 10, [])


def test_a_gap_is_refused() -> None:
    request = Request(make_request("r", range(10), prompt_logprobs=True), 1, 20)
    collect(request, 1, 0, 3, entries_of(range(10), 1, 4))
    with pytest.raises(RuntimeError, match=r"4 prompt logprobs for request 'r'.* tokens 5 to 8; 3 are there"):
        collect(request, 2, 4, 4, entries_of(range(10), 5, 9))


def test_a_worker_may_answer_in_another_order(driver_of: DriverOf) -> None:
    scheduler = driver_of().scheduler
    scheduler.add_request(make_request("plain", [1, 2, 3], 5))
    scheduler.add_request(make_request("wants", range(6), 5, prompt_logprobs=True))
    plan = scheduler.schedule()
    entries = fake_prompt_logprobs(range(6))
    messages = scheduler.update_from_output(
        plan,
        ModelRunnerOutput(
            step_id=plan.step_id, slots=plan.slots[::-1], sampled_token_ids=[[7], [8]], prompt_logprobs={0: entries}
        ),
    )
    assert [(m.request_id, m.new_token_ids, m.prompt_logprobs) for m in messages] == [
        ("plain", [8], []),
        ("wants", [7], entries),
    ]
