"""Logits processors: which rows they want, and giving these rows to them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pegboard.contracts.logits_processor import LogitsProcessor
from pegboard.contracts.sampler import SamplingBatch
from pegboard_plugins.sampling.working_rows import WorkingRows


@dataclass(slots=True)
class Concern:
    """A processor and the rows of this batch [R] that it wants to change, in its own order."""

    processor: LogitsProcessor
    rows: np.ndarray

    def apply(self, work: WorkingRows, slots: np.ndarray) -> None:
        """In place. The processor may have changed what it got, or made something new of it."""
        places = work.place[self.rows]
        if len(places) == len(work.x) and bool((places == np.arange(len(places))).all()):
            where: object = slice(None)  # all of them in order: no copy to give, and none to take back
        else:
            where = work.index(places)
        given = work.logits[where]
        result = self.processor.apply(given, slots[self.rows].tolist())
        if result is not given or not isinstance(where, slice):
            work.logits[where] = result


def concerns(batch: SamplingBatch, *, invariant: bool, rows: np.ndarray) -> list[Concern]:
    """What the processors with this ``argmax_invariant`` want of ``rows`` [R]; those that want nothing are left out."""
    found = []
    for processor in batch.processors:
        if processor.argmax_invariant is invariant:
            slots = batch.slots[rows].tolist()
            row_of = dict(zip(slots, rows.tolist(), strict=True))
            wanted = processor.concerns(slots)
            if len(wanted):
                found.append(Concern(processor, np.array([row_of[slot] for slot in wanted], np.int64)))
    return found
