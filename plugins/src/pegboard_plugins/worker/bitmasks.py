"""Token bitmasks of grammars: from the wire to the rows that sample."""

from __future__ import annotations

import numpy as np

from pegboard.wire import GrammarOutput, SchedulerOutput


def masks_by_row(
    plan: SchedulerOutput, sample_slots: np.ndarray, grammar: GrammarOutput | None, vocab_limit: int
) -> dict[int, np.ndarray]:
    """Row among ``sample_slots`` [N] to its mask, at least ``ceil(vocab_limit / 32)`` uint32; ids that the mask does not reach
    are forbidden. Slots that do not sample are passed over.

    Raises ``ValueError`` where ``grammar`` belongs to another step or is damaged, and where a row of ``plan.grammar_slots`` that
    samples has no mask: it would get a token that its grammar may not allow.
    """
    masks: dict[int, np.ndarray] = {}
    row_of = {slot: row for row, slot in enumerate(sample_slots.tolist())}
    if grammar is not None:
        if grammar.step_id != plan.step_id:
            raise ValueError(f"sample_tokens: bitmasks of step {grammar.step_id}, but step {plan.step_id} is open")
        for slot, words in zip(grammar.slots, _words(grammar, vocab_limit), strict=True):
            if slot in row_of:
                masks[row_of[slot]] = words
    unknown = sorted(set(plan.grammar_slots) - set(plan.slots))
    if unknown:
        raise ValueError(f"step {plan.step_id}: slots {unknown} are said to have a grammar, but are not in the plan")
    missing = [slot for slot in plan.grammar_slots if slot in row_of and row_of[slot] not in masks]
    if missing:
        got = "none was given" if grammar is None else f"there are masks for slots {grammar.slots} only"
        raise ValueError(f"step {plan.step_id}: slots {missing} need a grammar's mask to sample, but {got}")
    return masks


def _words(grammar: GrammarOutput, vocab_limit: int) -> np.ndarray:
    """[slots, at least ceil(vocab_limit / 32)] little-endian uint32."""
    count = len(grammar.slots)
    if not count:
        return np.empty((0, 0), np.dtype("<u4"))
    if not grammar.bitmask or len(grammar.bitmask) % (4 * count):
        raise ValueError(
            f"step {grammar.step_id}: {len(grammar.bitmask)} bytes of bitmasks are not {count} rows of 32-bit words, one per slot"
        )
    words = np.frombuffer(grammar.bitmask, np.dtype("<u4")).reshape(count, -1)
    lacking = -(-vocab_limit // 32) - words.shape[1]
    return np.pad(words, ((0, 0), (0, lacking))) if lacking > 0 else words
