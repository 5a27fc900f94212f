"""What every worker must keep, shown with the scripted model, whose output tells whether the KV cache and the batch are right.

Subclass ``WorkerConformance`` and set ``worker`` to the provider's name, or to ``package.module:Class``. With ``ranks`` set,
several workers together must be as good as one. Needs torch and the standard parts.
"""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.contracts.worker import check_method
from pegboard.testing.conformance._worker_boot import MODEL, PROMPTS, SLOTS, continuation
from pegboard.testing.conformance._worker_rows import RowsOfAllKinds
from pegboard.testing.plan_driver import PlanDriver
from pegboard.testing.scripted_model import NAN
from pegboard.wire import SamplingParams, SchedulerOutput

__all__ = ["WorkerConformance", "continuation"]


class WorkerConformance(RowsOfAllKinds):
    """The contract of ``pegboard.contracts.worker``, as tests."""

    @pytest.mark.parametrize("chunk", [1, 3, 4, 64])
    def test_chunks_and_neighbours_change_nothing(self, driver: PlanDriver, chunk: int) -> None:
        for name, prompt in PROMPTS.items():
            driver.add(name, prompt)
        assert driver.generate(12, chunk) == {name: continuation(prompt, 12) for name, prompt in PROMPTS.items()}

    def test_intermediate_chunks_sample_nothing(self, driver: PlanDriver) -> None:
        driver.add("b", PROMPTS["b"])
        assert driver.step({"b": 20}) == {}
        assert driver.last_output is not None
        assert driver.last_output.sampled_token_ids == [[]]
        assert driver.step({"b": 1}) == {"b": continuation(PROMPTS["b"], 1)[0]}

    def test_slots_are_reused_in_one_plan(self, driver: PlanDriver) -> None:
        for i in range(SLOTS):
            driver.add(str(i), [i + 1] * (i + 1))
        driver.generate(3)
        for i in range(SLOTS):
            driver.finish(str(i))
            driver.add(f"new{i}", [40 + i] * 5)
        assert driver.generate(3) == {f"new{i}": continuation([40 + i] * 5, 3) for i in range(SLOTS)}

    def test_a_preempted_request_comes_back(self, driver: PlanDriver) -> None:
        for name, prompt in PROMPTS.items():
            driver.add(name, prompt)
        driver.generate(5)
        driver.preempt("b")
        driver.preempt("d")
        driver.step({"a": 1, "c": 1})
        assert driver.generate(12, chunk=7) == {name: continuation(prompt, 12) for name, prompt in PROMPTS.items()}

    @pytest.mark.parametrize("chunk", [1, 5, 64])
    def test_groups_of_layers_have_block_tables_of_their_own(self, chunk: int) -> None:
        """What is behind a window is given to others at once."""
        windows = (6, 1, None)
        worker = self.boot(windows=windows)
        driver = self.drive(worker, windows)
        for name, prompt in PROMPTS.items():
            driver.add(name, prompt)
        driver.fork("e", "b")
        driver.generate(5, chunk)
        driver.preempt("b")
        wanted = {**PROMPTS, "e": PROMPTS["b"]}
        assert driver.generate(20, chunk) == {name: continuation(prompt, 20) for name, prompt in wanted.items()}
        worker.shutdown()

    def test_steps_may_be_planned_before_their_tokens_are_known(self, driver: PlanDriver) -> None:
        if driver.sends_tokens:
            pytest.skip("pipeline stages get a token when it is known")
        driver.add("a", PROMPTS["a"])
        driver.add("b", PROMPTS["b"])
        chunks: list[dict[str, int]] = [{"a": 3, "b": 21}, {"a": 1, "b": 1}, {"b": 1, "a": 1}]
        plans = [driver.plan(chunk) for chunk in chunks]
        for chunk, plan in zip(chunks, plans, strict=True):
            driver.book(chunk, driver.execute(plan))
        assert driver.requests["a"].output == continuation(PROMPTS["a"], 3)
        assert driver.requests["b"].output == continuation(PROMPTS["b"], 3)

    def test_a_plan_without_rows_changes_state_only(self, driver: PlanDriver) -> None:
        driver.add("a", PROMPTS["a"])
        driver.generate(1)
        driver.finish("a")
        output = driver.execute(driver.plan({}))
        assert (output.slots, output.sampled_token_ids) == ([], [])

    def test_blocks_are_copied(self, driver: PlanDriver) -> None:
        driver.add("a", [1, 2, 3, 4, 5, 6])
        driver.generate(1)
        request = driver.requests["a"]
        fresh = driver._free_blocks.pop()
        old, request.blocks[1] = request.blocks[1], fresh
        plan = driver.plan({"a": 1})
        plan.block_copies = [(old, fresh)]
        # the table cannot be changed in place: the request leaves and enters with the copy
        assert request.slot is not None
        plan.preempted_slots = [request.slot]
        known = request.token_ids[:-1]
        plan.new_requests.append(_entering(driver, request.slot, known, request.blocks))
        assert driver.book({"a": 1}, driver.execute(plan)) == {"a": MODEL(known)}

    def test_blocks_are_swapped(self) -> None:
        worker = self.boot(host_blocks=8)
        driver = self.drive(worker)
        driver.add("a", [1, 2, 3, 4, 5, 6])
        driver.generate(2)
        request = driver.requests["a"]
        assert request.slot is not None
        slot, old = request.slot, list(request.blocks)
        away = SchedulerOutput(step_id=100, preempted_slots=[slot], swap_out=[(block, i + 1) for i, block in enumerate(old)])
        worker.execute_model(away)
        fresh = request.blocks = [driver._free_blocks.pop() for _ in old]
        driver.add("other", [50] * 11)
        driver.generate(2)  # writes to other blocks meanwhile
        plan = driver.plan({"a": 1})
        plan.swap_in = [(i + 1, block) for i, block in enumerate(fresh)]
        plan.new_requests.append(_entering(driver, slot, request.token_ids[:-1], fresh))
        assert driver.book({"a": 1}, driver.execute(plan)) == {"a": MODEL(request.token_ids[:-1])}
        worker.shutdown()

    def test_logits_that_are_no_numbers_fail_their_row(self) -> None:
        bad = [2, 2, 2]
        worker = self.boot(lambda tokens: NAN if tokens[:3] == bad else MODEL(tokens))
        driver = self.drive(worker)
        driver.add("good", PROMPTS["a"])
        driver.add("bad", bad)
        assert driver.step({"bad": 3, "good": 3}) == {"good": continuation(PROMPTS["a"], 1)[0]}
        assert driver.last_output is not None
        assert list(driver.last_output.errors) == [0]
        driver.finish("bad")
        assert driver.generate(4)["good"] == continuation(PROMPTS["a"], 4)
        worker.shutdown()

    def test_logprobs_are_under_the_rows_of_the_plan(self, driver: PlanDriver) -> None:
        driver.add("b", PROMPTS["b"])
        driver.add("a", PROMPTS["a"], SamplingParams(temperature=0.0, logprobs=2))
        sampled = driver.step({"b": 4, "a": 3})
        assert driver.last_output is not None
        assert list(driver.last_output.logprobs) == [1]
        assert driver.last_output.logprobs[1][0].token_ids[0] == sampled["a"]

    def test_methods_are_declared(self, driver: PlanDriver) -> None:
        worker = driver.execute.__self__  # type: ignore[attr-defined]
        for method in (
            "execute_model",
            "sample_tokens",
            "determine_available_memory",
            "initialize_cache",
            "sleep",
            "check_health",
        ):
            check_method(type(worker), method)
        worker.check_health()


def _entering(driver: PlanDriver, slot: int, token_ids: list[int], blocks: list[int]) -> Any:
    entering = driver._new("a", driver.requests["a"])
    entering.slot, entering.token_ids, entering.block_ids = slot, token_ids, [list(blocks)]
    return entering
