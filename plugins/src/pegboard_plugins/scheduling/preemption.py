"""RecomputePreemption: the last one in is the first one out, and its tokens are computed again later."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.contracts.preemption_policy import BlockNeed, PreemptionMode, PreemptionPolicy
from pegboard.contracts.views import RequestView, SchedulingView


class RecomputePreemption(PreemptionPolicy):
    """Victims are the least urgent (largest ``priority``), and among equals the youngest in the batch: it has the least to
    lose, and those that have run longest finish and give their blocks back."""

    def victims(self, need: BlockNeed, candidates: Sequence[RequestView], context: SchedulingView) -> list[str]:
        youngest_first = reversed(candidates)
        return [view.request_id for view in sorted(youngest_first, key=lambda view: -view.priority)]

    def mode(self, request: RequestView) -> PreemptionMode:
        return "recompute"
