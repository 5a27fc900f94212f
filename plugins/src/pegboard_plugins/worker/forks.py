"""Forked rows: requests that share a prompt and sample their first token from the logits of the row that computes it."""

from __future__ import annotations

import numpy as np

from pegboard.wire import SchedulerOutput
from pegboard_plugins.worker.input_batch import InputBatch


def logits_rows(plan: SchedulerOutput, batch: InputBatch) -> np.ndarray | None:
    """[B] int64: for each row of ``plan`` the row whose last token gives its logits, itself unless it is forked. None where
    nothing is forked. ``batch`` has applied the plan.

    Raises ``ValueError`` for a row without tokens that is no fork, and for a fork whose source cannot serve it.
    """
    if 0 in plan.num_scheduled_tokens:
        _check_empty_rows(plan)
    if not plan.fork_slots:
        return None
    row_of = {slot: row for row, slot in enumerate(plan.slots)}
    entering = {request.slot for request in plan.new_requests}
    parents: dict[int, int] = {}
    for slot, source in zip(plan.fork_slots, plan.fork_sources, strict=True):
        problem = _problem(plan, batch, row_of, entering, slot, source)
        if problem is not None:
            raise ValueError(f"step {plan.step_id} forks slot {slot} from slot {source}, but {problem}")
        parents[row_of[slot]] = row_of[source]
    rows = np.arange(len(plan.slots))
    for row in parents:
        rows[row] = _root(row, parents, plan)
    return rows


def _check_empty_rows(plan: SchedulerOutput) -> None:
    forked = set(plan.fork_slots)
    for slot, count in zip(plan.slots, plan.num_scheduled_tokens, strict=True):
        if not count and slot not in forked:
            raise ValueError(f"step {plan.step_id} schedules no token of slot {slot}, which is not forked from another one")


def _problem(
    plan: SchedulerOutput, batch: InputBatch, row_of: dict[int, int], entering: set[int], slot: int, source: int
) -> str | None:
    """Why slot ``slot`` cannot take its first token from the logits of slot ``source``, or None."""
    for each in (slot, source):
        if each not in row_of:
            return f"slot {each} is not in the plan"
        if plan.num_to_sample[row_of[each]] != 1:
            return f"slot {each} samples {plan.num_to_sample[row_of[each]]} tokens instead of 1"
    row, origin = row_of[slot], row_of[source]
    if slot not in entering:
        return f"slot {slot} does not enter in this step"
    if plan.num_scheduled_tokens[row]:
        return f"slot {slot} schedules {plan.num_scheduled_tokens[row]} tokens of its own"
    length = int(batch.prompt_lens[slot])
    if plan.num_computed_tokens[row] != length:
        return f"slot {slot} counts {plan.num_computed_tokens[row]} of its {length} prompt tokens as computed"
    end = plan.num_computed_tokens[origin] + plan.num_scheduled_tokens[origin]
    if end != batch.prompt_lens[source]:
        return f"slot {source} reaches token {end}, and its prompt ends at {batch.prompt_lens[source]}"
    if end != length or not np.array_equal(batch.token_ids[slot, :length], batch.token_ids[source, :length]):
        return "their prompts differ"
    return None


def _root(row: int, parents: dict[int, int], plan: SchedulerOutput) -> int:
    """The row that computes the prompt which ``row`` shares, by way of other forks or not."""
    origin, steps = row, 0
    while origin in parents:
        origin, steps = parents[origin], steps + 1
        if steps > len(parents):
            raise ValueError(f"step {plan.step_id} forks slot {plan.slots[row]} from a row that is forked from it")
    return origin
