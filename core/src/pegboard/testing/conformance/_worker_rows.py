"""Rows that want more than a token: forks, log probabilities of prompts, masks of grammars, alone and together."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from pegboard.testing.conformance._worker_boot import BLOCK, MODEL, PROMPTS, VOCAB, BootedWorker, continuation
from pegboard.testing.plan_driver import DrivenRequest, PlanDriver, bitmask
from pegboard.wire import GrammarOutput, SamplingParams

PREFERRED = 10.0
"""Logit of the scripted model's next token; that of all others is 0."""
NORMALISER = math.log(math.exp(PREFERRED) + VOCAB - 1)
WITH_PROMPT = SamplingParams(temperature=0.0, max_tokens=None, prompt_logprobs=2)


def seeded(seed: int, **changes: Any) -> SamplingParams:
    """About half of the draws are the model's token, which tells whether the context is right; the others differ by seed."""
    return SamplingParams(temperature=1.6, seed=seed, max_tokens=None, **changes)


def assert_prompt_logprobs(request: DrivenRequest, first: int = 1) -> None:
    """Every prompt token from position ``first`` on was reported, and only those, as the scripted model sees them."""
    prompt = request.token_ids[: request.prompt_len]
    assert sorted(request.prompt_logprobs) == list(range(first, request.prompt_len))
    for position, entry in request.prompt_logprobs.items():
        preferred = MODEL(prompt[:position])
        hit = prompt[position] == preferred
        assert entry.token_ids[0] == prompt[position]
        assert entry.rank == (1 if hit else 2), f"position {position}"
        assert math.isclose(entry.logprobs[0], (PREFERRED if hit else 0.0) - NORMALISER, abs_tol=1e-4)
        assert len(set(entry.token_ids)) == len(entry.token_ids) in ((2,) if hit else (2, 3))
        if not hit:
            assert entry.token_ids[1] == preferred, f"position {position}"
            assert math.isclose(entry.logprobs[1], PREFERRED - NORMALISER, abs_tol=1e-4)


class RowsOfAllKinds(BootedWorker):
    """Part of ``WorkerConformance``."""

    # forks ----------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("chunk", [1, 4, 5, 64])
    def test_forks_equal_requests_of_their_own(self, driver: PlanDriver, chunk: int) -> None:
        """Prompts of 3, 21, 1 and 16 tokens in blocks of 4: with a partly filled block to copy, and without."""
        for name, prompt in PROMPTS.items():
            driver.add(f"{name}0", prompt, seeded(0))
            driver.add(f"{name}1", prompt, seeded(1))
        alone = driver.generate(12)
        for name in list(driver.requests):
            driver.finish(name)
        for name, prompt in PROMPTS.items():
            driver.add(f"{name}0", prompt, seeded(0))
            driver.fork(f"{name}1", f"{name}0", seeded(1))
        assert driver.generate(12, chunk) == alone
        assert len({tuple(output) for output in alone.values()}) == len(alone)
        followed = [MODEL(PROMPTS[n[0]] + output[:i]) == output[i] for n, output in alone.items() for i in range(12)]
        assert sum(followed) > 20, "the tokens depend on the context"

    def test_a_fork_may_stand_before_its_source_and_outlive_it(self, driver: PlanDriver) -> None:
        driver.add("a", PROMPTS["b"])
        for name in ("x", "y"):
            driver.fork(name, "a")
        expected = continuation(PROMPTS["b"], 6)
        assert driver.step({"x": 0, "a": 21, "y": 0}) == dict.fromkeys("xay", expected[0])
        driver.finish("a")
        driver.add("new", [1, 2, 3])  # may be given the blocks that the source had
        found = driver.generate(6)
        assert (found["x"], found["y"], found["new"]) == (expected, expected, continuation([1, 2, 3], 6))

    def test_a_fork_of_a_fork_takes_the_same_logits(self, driver: PlanDriver) -> None:
        driver.add("a", PROMPTS["a"])
        driver.fork("x", "a")
        driver.fork("y", "a")
        plan = driver.plan({"y": 0, "a": 3, "x": 0})
        y, a, x = plan.slots
        plan.fork_sources = [{x: a, y: x}[slot] for slot in plan.fork_slots]
        output = driver.execute(plan)
        assert set(driver.book({"y": 0, "a": 3, "x": 0}, output).values()) == {MODEL(PROMPTS["a"])}

    def test_forks_report_what_a_request_of_their_own_reports(self, driver: PlanDriver) -> None:
        driver.add("a", PROMPTS["a"], seeded(3, logprobs=3))
        driver.fork("x", "a", seeded(4, logprobs=3))
        driver.add("own", PROMPTS["a"], seeded(4, logprobs=3))
        driver.generate(1)
        assert driver.requests["x"].logprobs == driver.requests["own"].logprobs != driver.requests["a"].logprobs

    def test_a_preempted_fork_comes_back(self, driver: PlanDriver) -> None:
        driver.add("a", PROMPTS["b"])
        driver.fork("x", "a")
        driver.step({"a": 21, "x": 0})
        driver.preempt("x")  # before its block was copied
        driver.generate(3)
        driver.preempt("a")
        driver.preempt("x")
        assert driver.generate(8, chunk=5) == dict.fromkeys(("a", "x"), continuation(PROMPTS["b"], 8))

    # log probabilities of prompts -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("chunk", [1, 3, 4, 200])
    def test_prompt_logprobs(self, driver: PlanDriver, chunk: int) -> None:
        prompts = {**PROMPTS, "likely": [9, *continuation([9], 6)], "long": [(7 * i) % 400 for i in range(150)]}
        for name, prompt in prompts.items():
            driver.add(name, prompt, WITH_PROMPT)
        driver.add("without", PROMPTS["b"])
        found = driver.generate(4, chunk)
        for name, prompt in prompts.items():
            assert_prompt_logprobs(driver.requests[name])
            assert found[name] == continuation(prompt, 4), "reporting changes no token"
        assert not driver.requests["without"].prompt_logprobs
        assert driver.last_output is not None
        assert not driver.last_output.prompt_logprobs

    def test_prompt_logprobs_are_under_the_rows_of_the_plan(self, driver: PlanDriver) -> None:
        driver.add("x", PROMPTS["b"])
        driver.add("b", PROMPTS["b"], WITH_PROMPT)
        driver.step({"x": 3, "b": 5})
        assert driver.last_output is not None
        assert {row: len(entries) for row, entries in driver.last_output.prompt_logprobs.items()} == {1: 5}
        driver.step({"b": 15, "x": 1})
        assert {row: len(entries) for row, entries in driver.last_output.prompt_logprobs.items()} == {0: 15}
        driver.step({"b": 1})
        assert not driver.last_output.prompt_logprobs, "the last position predicts the output"
        assert_prompt_logprobs(driver.requests["b"])

    def test_prompt_logprobs_of_a_prompt_that_is_cached_in_part(self, driver: PlanDriver) -> None:
        driver.add("a", PROMPTS["b"])
        driver.generate(1)
        driver.add("b", [*PROMPTS["b"], 7], WITH_PROMPT)
        driver.share_prefix("b", "a", 3)
        assert driver.generate(3, chunk=4)["b"] == continuation([*PROMPTS["b"], 7], 3)
        assert_prompt_logprobs(driver.requests["b"], first=3 * BLOCK + 1)

    def test_prompt_logprobs_of_preempted_requests(self, driver: PlanDriver) -> None:
        for name in ("early", "late"):
            driver.add(name, PROMPTS["b"], WITH_PROMPT)
        driver.step({"early": 9, "late": 21})
        driver.step({"late": 1})
        for name in ("early", "late"):
            driver.preempt(name)
            driver.requests[name].prompt_logprobs.clear()
        found = driver.generate(5, chunk=10)
        for name in ("early", "late"):
            assert_prompt_logprobs(driver.requests[name])
            assert found[name] == continuation(PROMPTS["b"], 5)

    @pytest.mark.parametrize("leave", [PlanDriver.finish, PlanDriver.preempt])
    def test_a_slot_that_is_used_again_reports_nothing_of_its_new_request(self, driver: PlanDriver, leave: Any) -> None:
        driver.add("a", PROMPTS["b"], WITH_PROMPT)
        driver.step({"a": 5})
        slot = driver.requests["a"].slot
        leave(driver, "a")
        driver.add("new", PROMPTS["d"])
        driver.step({"new": 9})
        assert driver.requests["new"].slot == slot
        assert driver.last_output is not None
        assert not driver.last_output.prompt_logprobs

    def test_a_prompt_whose_logits_are_no_numbers_fails_its_row(self) -> None:
        worker = self.boot(lambda tokens: -1 if tokens == [2, 2] else MODEL(tokens))
        driver = self.drive(worker)
        driver.add("bad", [2, 2, 3, 4], msgspec.structs.replace(WITH_PROMPT, logprobs=1))
        driver.add("good", PROMPTS["a"], WITH_PROMPT)
        assert driver.step({"bad": 4, "good": 3}) == {"good": MODEL(PROMPTS["a"])}
        assert driver.last_output is not None
        assert list(driver.last_output.errors) == [0]
        assert list(driver.last_output.prompt_logprobs) == [1], "an error, instead of the entries before it"
        assert not driver.last_output.logprobs, "nothing is said of a token that was not given"
        assert_prompt_logprobs(driver.requests["good"])
        worker.shutdown()

    # grammars -------------------------------------------------------------------------------------------------------

    def test_two_halves_with_a_bitmask(self, driver: PlanDriver) -> None:
        driver.add("a", PROMPTS["a"])
        driver.add("b", PROMPTS["b"])
        sampled = driver.step({"a": 3, "b": 21}, allowed={"b": [77]})
        assert sampled == {"a": continuation(PROMPTS["a"], 1)[0], "b": 77}
        assert driver.step({"b": 1}) == {"b": MODEL([*PROMPTS["b"], 77])}

    def test_a_mask_leaves_reported_log_probabilities_alone(self, driver: PlanDriver) -> None:
        driver.add("a", PROMPTS["a"], SamplingParams(temperature=0.0, logprobs=1))
        driver.step({"a": 3}, allowed={"a": [77]})
        entry = driver.requests["a"].logprobs[0]
        assert (entry.token_ids, entry.rank) == ([77, MODEL(PROMPTS["a"])], 2)
        assert math.isclose(entry.logprobs[0], -NORMALISER, abs_tol=1e-4)

    @pytest.mark.parametrize("which", ["none", "another", "an earlier step's"])
    def test_a_row_with_a_grammar_gets_no_token_without_its_mask(self, driver: PlanDriver, which: str) -> None:
        driver.add("a", PROMPTS["a"])
        driver.add("b", PROMPTS["b"])
        plan = driver.plan({"a": 3, "b": 21}, grammars=["a", "b"])
        assert driver.execute(plan) is None
        mask = bitmask([77], VOCAB)
        grammar = {
            "none": None,
            "another": GrammarOutput(step_id=plan.step_id, slots=plan.slots[:1], bitmask=mask),
            "an earlier step's": GrammarOutput(step_id=plan.step_id - 1, slots=plan.slots, bitmask=mask + mask),
        }[which]
        with pytest.raises(ValueError, match=f"step {plan.step_id}"):
            driver.sample(grammar)  # type: ignore[misc, arg-type]

    def test_all_kinds_in_one_plan(self, driver: PlanDriver) -> None:
        driver.add("old", PROMPTS["c"])
        driver.generate(2)
        driver.add("a", PROMPTS["a"], WITH_PROMPT)
        driver.add("b", PROMPTS["b"], WITH_PROMPT)
        driver.add("d", PROMPTS["d"])
        for name, source in (("x", "a"), ("y", "a"), ("z", "d")):
            driver.fork(name, source)
        plan = {"x": 0, "b": 20, "old": 1, "z": 0, "a": 3, "y": 0, "d": 16}
        sampled = driver.step(plan, allowed={"x": [5, 6], "a": [77], "z": [4]})
        first, last = MODEL(PROMPTS["a"]), MODEL(PROMPTS["d"])
        old = continuation(PROMPTS["c"], 3)[2]
        assert sampled == {"x": 5, "old": old, "z": 4, "a": 77, "y": first, "d": last}
        assert_prompt_logprobs(driver.requests["a"])
        assert_prompt_logprobs(driver.requests["b"])
        found = driver.generate(6)
        assert found["x"][1] == MODEL([*PROMPTS["a"], 5])
        assert found["z"][1:] == continuation([*PROMPTS["d"], 4], 5)
        assert found["b"] == continuation(PROMPTS["b"], 6)
