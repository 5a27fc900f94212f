"""Conformance of a Scheduler: what every scheduler must do with requests, whatever it plans. Subclass and give ``make``.

Requests run on a fake model (``pegboard.testing.fakes``) whose next token depends on every token before it, through a mirror
worker that refuses plans which no worker could follow; what comes out is compared with the same model run token by token.
"""

from __future__ import annotations

import random

import pytest
from hypothesis.stateful import run_state_machine_as_test

from pegboard.contracts.scheduler import PauseState, RequestStatus
from pegboard.testing.conformance._scheduler_features import FeatureCases
from pegboard.testing.conformance._scheduler_kit import CACHES, DEPTHS, SchedulerKit
from pegboard.testing.conformance._scheduler_machine import SchedulerMachine
from pegboard.testing.conformance._views import QUICK
from pegboard.testing.driver import make_request
from pegboard.testing.fakes import scripted_model
from pegboard.wire import FinishReason


class SchedulerConformance(FeatureCases, SchedulerKit):
    """Give ``make``; say in ``capabilities`` what the scheduler's provider says, and with ``shares_prompts`` that it computes the
    prompt of a group once. Requests with a group must be served by every scheduler."""

    # -- limits --------------------------------------------------------------------------------------------------------

    @CACHES
    def test_a_prompt_that_can_never_fit_is_refused_at_once(self, allocator: str) -> None:
        driver = self.driver(19, 16, allocator=allocator, max_model_len=2048)
        usable = 19 * 16
        for number, length in enumerate((usable - 1, usable, usable + 1, 1000)):
            long, short = make_request(f"long{number}", range(length), 1), make_request(f"short{number}", [1, 2, 3], 4)
            if length > usable:
                with pytest.raises(ValueError, match=rf"{length}.*{usable}"):
                    driver.add(long)
                driver.add(short)
                driver.run()
                self.assert_right(driver, [short])
            else:
                driver.add(long, short)
                driver.run()
                self.assert_right(driver, [long, short])

    @DEPTHS
    def test_output_that_outgrows_the_pool_ends_by_length(self, depth: int) -> None:
        driver = self.driver(4, 4, depth=depth)
        driver.add(make_request("r", [1, 2, 3], 100), make_request("s", [4, 5], 3))
        driver.run(500)
        assert driver.finished == {"r": FinishReason.LENGTH, "s": FinishReason.LENGTH}
        assert 3 + len(driver.tokens["r"]) in (16, 17), "the pool holds 16 tokens; the last one needs no place"

    @pytest.mark.parametrize("prompt_len", [126, 127, 128, 129])
    @pytest.mark.parametrize("max_tokens", [1, 2, 5])
    def test_edges_of_the_context_length(self, prompt_len: int, max_tokens: int) -> None:
        driver = self.driver(max_model_len=128)
        request = make_request("r", range(prompt_len), max_tokens)
        if prompt_len >= 128:
            with pytest.raises(ValueError, match=f"{prompt_len}.*128"):
                driver.add(request)
            return
        driver.add(request)
        driver.run()
        assert len(driver.tokens["r"]) == min(max_tokens, 128 - prompt_len)
        assert driver.finished["r"] == FinishReason.LENGTH

    def test_an_empty_prompt_is_refused(self) -> None:
        driver = self.driver()
        with pytest.raises(ValueError, match="empty"):
            driver.add(make_request("r", []))
        assert not driver.scheduler.has_requests()

    # -- tokens --------------------------------------------------------------------------------------------------------

    @DEPTHS
    @pytest.mark.parametrize("budget", [1, 16, 17, 64, 512])
    def test_chunks_do_not_change_tokens(self, budget: int, depth: int) -> None:
        alone = make_request("r", range(300), 12)
        driver = self.driver(depth=depth, max_num_batched_tokens=budget)
        driver.add(alone)
        driver.run()
        self.assert_right(driver, [alone])
        neighbours = [make_request(f"n{i}", [7, i], 40) for i in range(3)]
        driver = self.driver(depth=depth, max_num_batched_tokens=budget)
        driver.add(*neighbours)
        for _ in range(5):
            driver.step()
        driver.add(alone)
        driver.run()
        self.assert_right(driver, [*neighbours, alone])

    @DEPTHS
    @CACHES
    @pytest.mark.parametrize("max_num_seqs", [3, 8, 40])
    def test_no_cross_talk(self, max_num_seqs: int, allocator: str, depth: int) -> None:
        rng = random.Random(1)
        requests = [make_request(f"r{i}", [rng.randrange(9)] * rng.randrange(1, 100), rng.randrange(1, 30)) for i in range(40)]
        driver = self.driver(120, 8, depth=depth, allocator=allocator, max_num_seqs=max_num_seqs, check=False)
        for request in requests:
            driver.add(request)
            if rng.random() < 0.5:
                driver.step()
        driver.run()
        self.assert_right(driver, requests)

    @DEPTHS
    def test_a_full_hit_still_computes_the_last_token(self, depth: int) -> None:
        block = 8
        driver = self.driver(200, block, depth=depth)
        for length in (block - 1, block, block + 1, 2 * block - 1, 2 * block, 3 * block):
            prompt = [length, *range(length - 1)]
            for turn in range(3):
                request = make_request(f"r{length}.{turn}", prompt, 2 * block + 4)
                driver.add(request)
                driver.run()
                self.assert_right(driver, [request])
                cached = driver.last[request.request_id].num_cached_tokens
                assert cached == ((length - 1) // block * block if turn else 0)
            follow_up = make_request(f"r{length}.next", [*prompt, *driver.tokens[f"r{length}.2"], 5], 4)
            driver.add(follow_up)
            driver.run()
            self.assert_right(driver, [follow_up])
            computed = length + 2 * block + 4 - 1  # the last token was sampled, not computed
            assert driver.last[follow_up.request_id].num_cached_tokens == computed // block * block

    @DEPTHS
    def test_stop_tokens_count_from_min_tokens_on(self, depth: int) -> None:
        stop = 2
        for min_tokens in (0, 1, 3, 7):
            model = scripted_model({(1,): [stop] * 24})
            driver = self.driver(depth=depth, model=model)
            driver.add(make_request("r", [1], 24, stop_token_ids=[9, stop], min_tokens=min_tokens))
            driver.run()
            assert len(driver.tokens["r"]) == min_tokens + 1
            assert driver.finished["r"] == FinishReason.STOP
            assert driver.last["r"].stop_reason == stop
            self.assert_idle(driver)

    # -- preemption ----------------------------------------------------------------------------------------------------

    @DEPTHS
    @CACHES
    def test_a_tight_pool_changes_no_token_and_does_not_thrash(self, allocator: str, depth: int) -> None:
        rng = random.Random(0)
        requests = [make_request(f"r{i}", [rng.randrange(1000) for _ in range(150)], 80) for i in range(8)]
        driver = self.driver(37, 16, depth=depth, allocator=allocator, max_num_batched_tokens=32, check=False)
        driver.add(*requests)
        one_by_one = 8 * (5 + 80)
        driver.run(5 * one_by_one)
        self.assert_right(driver, requests)
        assert driver.scheduler.stats().num_preemptions >= 1
        assert max(message.num_preemptions for message in driver.last.values()) <= 10

    @DEPTHS
    @CACHES
    def test_preempted_requests_resume_where_they_were(self, allocator: str, depth: int) -> None:
        requests = [make_request(f"r{i}", [i, 3, 5, 7], 40, stop_token_ids=[11], min_tokens=30) for i in range(8)]
        driver = self.driver(16, 8, depth=depth, allocator=allocator)
        driver.add(*requests)
        driver.run()
        assert driver.scheduler.stats().num_preemptions >= 5, "the pool is too large for this test"
        self.assert_right(driver, requests)

    # -- fairness ------------------------------------------------------------------------------------------------------

    def test_a_long_prefill_does_not_starve_running_requests(self) -> None:
        driver = self.driver(max_num_batched_tokens=64)
        stream = make_request("a", [1, 2, 3], 200)
        driver.add(stream)
        driver.step()
        long = [make_request(f"b{i}", range(i, i + 1500), 3) for i in range(6)]
        driver.add(*long)
        gaps = [0]
        while "a" not in driver.finished:
            news = {output.request_id for output in driver.step()}
            gaps = [*gaps, 0] if "a" in news else [*gaps[:-1], gaps[-1] + 1]
            assert gaps[-1] <= 3
        driver.run()
        self.assert_right(driver, [stream, *long])

    # -- ends ----------------------------------------------------------------------------------------------------------

    @DEPTHS
    def test_aborts_in_every_phase_free_everything_at_once(self, depth: int) -> None:
        driver = self.driver(8, 8, depth=depth, max_num_batched_tokens=16, max_num_seqs=4)
        rng = random.Random(depth)
        for turn in range(20):
            requests = [make_request(f"{turn}.{i}", range(rng.randrange(1, 40)), rng.randrange(1, 12)) for i in range(20)]
            driver.add(*requests)
            for _ in range(rng.randrange(4)):
                driver.step()
            driver.abort(rng.sample([r.request_id for r in requests], 8))
            for _ in range(rng.randrange(4)):
                driver.step()
            driver.abort([r.request_id for r in requests])
            stats = driver.scheduler.stats()
            assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
            assert driver.abort(["nobody", requests[0].request_id]) == []
            big = make_request(f"{turn}.big", range(63), 2)
            driver.add(big)
            driver.run()
            self.assert_right(driver, [big])
        assert len(driver.finished) == 20 * 21

    @DEPTHS
    def test_an_id_in_use_is_refused_and_may_be_used_again_after_its_end(self, depth: int) -> None:
        driver = self.driver(30, 8, depth=depth)
        first = make_request("x", [1, 2, 3], 10)
        driver.add(first)
        with pytest.raises(ValueError, match="'x'"):
            driver.scheduler.add_request(make_request("x", [4, 5], 3))
        driver.step()
        with pytest.raises(ValueError, match="'x'"):
            driver.scheduler.add_request(make_request("x", [4, 5], 3))
        driver.run()
        self.assert_right(driver, [first])
        for turn in range(50):
            driver.add(make_request("x", range(turn, turn + 20), 30))
            for _ in range(1 + turn % 5):
                driver.step()
            driver.abort(["x"])
            again = make_request("x", [turn, 1], 6)
            driver.add(again)
            driver.run()
            self.assert_right(driver, [again])

    @DEPTHS
    def test_a_row_that_fails_fails_alone(self, depth: int) -> None:
        driver = self.driver(depth=depth)
        good, bad = make_request("good", [1, 2], 10), make_request("bad", [1, 2], 10)
        driver.add(good, bad)
        driver.step()
        driver.runner.fail_rows["bad"] = "logits are not a number"
        driver.run()
        assert driver.finished["bad"] == FinishReason.ERROR
        assert driver.last["bad"].stop_reason == "logits are not a number"
        self.assert_right(driver, [good])

    def test_workers_are_told_of_the_last_slot(self) -> None:
        driver = self.driver()
        driver.add(make_request("r", [1], 1))
        driver.step()
        assert driver.finished == {"r": FinishReason.LENGTH}
        assert driver.scheduler.has_requests()
        plan = driver.plan()
        assert plan.empty
        assert plan.has_state_changes
        assert not driver.scheduler.has_requests()
        assert driver.runner.mirror.rows == {}

    def test_only_a_finished_status_ends_a_request(self) -> None:
        driver = self.driver()
        driver.add(make_request("r", [1]), make_request("s", [1]))
        with pytest.raises(ValueError, match="PREEMPTED"):
            driver.scheduler.finish_requests(["r"], RequestStatus.PREEMPTED)
        assert driver.abort(None) == ["r", "s"]
        assert driver.abort(None) == []

    # -- pausing and the cache -----------------------------------------------------------------------------------------

    @DEPTHS
    def test_pausing(self, depth: int) -> None:
        driver = self.driver(depth=depth, max_num_seqs=1)
        first, second = make_request("first", [1, 2], 8), make_request("second", [3, 4], 8)
        driver.add(first, second)
        driver.step()
        driver.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while driver.in_flight:
            driver.book()
        assert driver.plan().empty
        driver.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        for _ in range(12):
            driver.step()
        assert driver.finished == {"first": FinishReason.LENGTH}
        assert driver.tokens["second"] == []
        driver.scheduler.set_pause_state(PauseState.UNPAUSED)
        driver.run()
        self.assert_right(driver, [first, second])

    def test_the_prefix_cache_is_reset_only_when_idle(self) -> None:
        driver = self.driver(block_size=4)
        request = make_request("r", range(9), 4)
        driver.add(request)
        driver.step()
        assert driver.scheduler.reset_prefix_cache() is False
        driver.run()
        assert driver.scheduler.reset_prefix_cache() is True
        driver.add(make_request("again", range(9), 4))
        driver.run()
        assert driver.last["again"].num_cached_tokens == 0

    # -- everything at once --------------------------------------------------------------------------------------------

    @CACHES
    def test_against_a_sequential_model(self, allocator: str) -> None:
        conformance = self

        class Machine(SchedulerMachine):
            kit = conformance
            allocator_name = allocator

        run_state_machine_as_test(Machine, settings=QUICK)
