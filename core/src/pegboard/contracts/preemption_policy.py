"""PreemptionPolicy: who gives up KV blocks when they run out, and how."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pegboard.contracts.views import RequestView, SchedulingView

API: Final = 1

PreemptionMode = Literal["recompute", "swap"]


@dataclass(frozen=True, slots=True)
class BlockNeed:
    """``num_blocks`` more free blocks are needed so that ``requester`` can run its next chunk."""

    requester: str
    num_blocks: int


class PreemptionPolicy(abc.ABC):
    """Chooses victims among running requests.

    Invariants: pure; never raises on one or many candidates; the order of candidates (oldest first) may be used, their
    identity must be among those given. Core ignores ids that are no candidates, frees victims in the given order until the
    need is met, and never lets the oldest running request be a victim unless it is the only one that is left.
    """

    @abc.abstractmethod
    def victims(self, need: BlockNeed, candidates: Sequence[RequestView], context: SchedulingView) -> Sequence[str] | None:
        """Ids in the order in which they should give way. None abstains: the youngest first."""

    def mode(self, request: RequestView) -> PreemptionMode | None:
        """How this victim is preempted. None abstains: recompute. "swap" falls back to recompute without host blocks."""
        return None

    def proactive(self, candidates: Sequence[RequestView], context: SchedulingView) -> Sequence[str]:
        """Once per step, before planning: ids to preempt although nothing forces it."""
        return ()
