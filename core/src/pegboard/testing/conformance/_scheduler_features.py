"""Cases of the scheduler conformance for requests that share a prompt, want prompt logprobs or have a grammar."""

from __future__ import annotations

import random

import pytest

from pegboard.testing.conformance._scheduler_kit import CACHES, DEPTHS, SchedulerKit
from pegboard.testing.driver import make_group, make_request
from pegboard.testing.fake_grammars import FakeGrammar
from pegboard.wire import FinishReason


class FeatureCases(SchedulerKit):
    # -- groups --------------------------------------------------------------------------------------------------------

    @DEPTHS
    @CACHES
    @pytest.mark.parametrize("prompt_len", [1, 2, 7, 8, 9, 16, 40])
    def test_each_answer_to_a_prompt_is_that_of_a_request_of_its_own(self, prompt_len: int, allocator: str, depth: int) -> None:
        for budget in (512, 8):
            driver = self.driver(60, 8, depth=depth, allocator=allocator, max_num_batched_tokens=budget)
            group, other = make_group("g", range(prompt_len), 5, 12), make_request("other", range(1, 30), 5)
            driver.add(*group[:3], other, *group[3:])
            driver.run()
            self.assert_right(driver, [*group, other])

    @DEPTHS
    @CACHES
    @pytest.mark.parametrize("max_num_seqs", [1, 2, 5])
    def test_more_answers_than_slots(self, max_num_seqs: int, allocator: str, depth: int) -> None:
        driver = self.driver(60, 8, depth=depth, allocator=allocator, max_num_seqs=max_num_seqs)
        groups = [*make_group("a", range(21), 7, 6), *make_group("b", range(16), 4, 9)]
        driver.add(*groups)
        driver.run()
        self.assert_right(driver, groups)

    @DEPTHS
    @CACHES
    def test_answers_to_one_prompt_in_a_tight_pool(self, allocator: str, depth: int) -> None:
        driver = self.driver(9, 4, depth=depth, allocator=allocator, max_num_batched_tokens=7)
        groups = [*make_group("a", range(10), 5, 12), *make_group("b", range(3, 9), 4, 15)]
        driver.add(*groups)
        driver.run()
        assert driver.scheduler.stats().num_preemptions > 0, "the pool is too large for this test"
        self.assert_right(driver, groups)

    @DEPTHS
    @CACHES
    def test_members_of_a_group_may_be_aborted_in_every_phase(self, allocator: str, depth: int) -> None:
        rng = random.Random(depth)
        driver = self.driver(20, 4, depth=depth, allocator=allocator, max_num_batched_tokens=8, max_num_seqs=5)
        for turn in range(60):
            group = make_group(f"g{turn}", range(turn, turn + rng.randrange(1, 18)), rng.randrange(2, 8), rng.randrange(1, 9))
            driver.add(*group)
            for _ in range(rng.randrange(4)):
                driver.abort([rng.choice(group).request_id])
                if rng.random() < 0.8 or not driver.in_flight:
                    driver.step()
                else:
                    driver.book()
            aborted = {r.request_id for r in group if driver.finished.get(r.request_id) == FinishReason.ABORT}
            if rng.random() < 0.5:
                driver.run()
                self.assert_right(driver, [r for r in group if r.request_id not in aborted])
        driver.run()
        self.assert_idle(driver)

    def test_equal_prompts_with_distinct_salts_are_apart(self) -> None:
        driver = self.driver(60, 8)
        requests = [make_request(f"r{i}", range(20), 4, group="g", variant=i, salt=salt) for i, salt in enumerate("aabb")]
        driver.add(*requests)
        driver.run()
        self.assert_right(driver, requests)
        assert driver.scheduler.stats().num_scheduled_tokens >= 2 * 20

    # -- prompt logprobs -----------------------------------------------------------------------------------------------

    @DEPTHS
    @CACHES
    @pytest.mark.parametrize("budget", [1, 8, 19, 512])
    def test_prompt_logprobs_come_whole_and_once(self, budget: int, allocator: str, depth: int) -> None:
        """Also where the prompt is in the cache, by its own hand or another's."""
        self.require("prompt_logprobs")
        driver = self.driver(60, 8, depth=depth, allocator=allocator, max_num_batched_tokens=budget)
        for length in (1, 2, 8, 9, 25):
            requests = [make_request(f"{length}.{i}", range(length), 3, prompt_logprobs=i % 2 == 0) for i in range(4)]
            driver.add(*requests[:2])
            driver.run()
            driver.add(*requests[2:])
            driver.run()
            self.assert_right(driver, requests)

    @DEPTHS
    @CACHES
    def test_prompt_logprobs_survive_preemption(self, allocator: str, depth: int) -> None:
        self.require("prompt_logprobs")
        driver = self.driver(20, 4, depth=depth, allocator=allocator, max_num_batched_tokens=9)
        requests = [make_request(f"r{i}", range(i, i + 14 + i), 20, prompt_logprobs=i % 3 > 0) for i in range(7)]
        driver.add(*requests)
        driver.run()
        assert driver.scheduler.stats().num_preemptions > 0, "the pool is too large for this test"
        self.assert_right(driver, requests)

    @DEPTHS
    @CACHES
    def test_one_answer_of_a_group_may_want_prompt_logprobs(self, allocator: str, depth: int) -> None:
        self.require("prompt_logprobs")
        for place in range(3):
            driver = self.driver(60, 8, depth=depth, allocator=allocator, max_num_batched_tokens=8)
            group = make_group("g", range(20), 3, 5, prompt_logprobs=True)
            driver.add(*group[place:], *group[:place])
            driver.run()
            self.assert_right(driver, group)

    # -- grammars ------------------------------------------------------------------------------------------------------

    @DEPTHS
    @CACHES
    def test_grammars_choose_and_end(self, allocator: str, depth: int) -> None:
        self.require("grammars")
        driver = self.driver(60, 8, depth=depth, allocator=allocator, max_num_batched_tokens=20)
        free = [make_request(f"free{i}", range(i + 3), 12) for i in range(3)]
        bound = [make_request(f"bound{i}", range(i + 3), 12, grammar=FakeGrammar(3 + i, 1 + 3 * i)) for i in range(3)]
        driver.add(*free, *bound)
        driver.run()
        self.assert_right(driver, [*free, *bound])
        assert [driver.finished[r.request_id] for r in bound] == [FinishReason.STOP] * 3
        assert [driver.last[r.request_id].stop_reason for r in bound] == [None] * 3

    @DEPTHS
    def test_an_end_with_the_grammar_asks_for_no_minimum(self, depth: int) -> None:
        self.require("grammars")
        driver = self.driver(depth=depth)
        request = make_request("r", [1, 2], 12, min_tokens=9, grammar=FakeGrammar(2, 4))
        driver.add(request)
        driver.run()
        self.assert_right(driver, [request])
        assert len(driver.tokens["r"]) == 4

    @DEPTHS
    @CACHES
    def test_grammars_survive_preemption_and_their_requests_can_be_aborted(self, allocator: str, depth: int) -> None:
        self.require("grammars")
        driver = self.driver(12, 4, depth=depth, allocator=allocator)
        requests = [make_request(f"r{i}", [i, 2, 3], 20, grammar=FakeGrammar(5, 15)) for i in range(6)]
        driver.add(*requests)
        for _ in range(7):
            driver.step()
        driver.abort(["r1"])
        driver.run()
        assert driver.scheduler.stats().num_preemptions > 0, "the pool is too large for this test"
        assert driver.grammars is not None
        assert not driver.grammars.outputs
        self.assert_right(driver, [r for r in requests if r.request_id != "r1"])

    @DEPTHS
    def test_answers_of_a_group_go_through_its_grammar_separately(self, depth: int) -> None:
        self.require("grammars")
        driver = self.driver(depth=depth)
        group = make_group("g", range(20), 4, 9, grammar=FakeGrammar(7, 6))
        driver.add(*group)
        driver.run()
        self.assert_right(driver, group)
        assert len({tuple(driver.tokens[r.request_id]) for r in group}) == 4
