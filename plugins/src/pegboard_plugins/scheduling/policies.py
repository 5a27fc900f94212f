"""Policies: the decisions of the standard scheduler, asked through the guard and checked before anybody acts on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pegboard.contracts.admission_policy import Admission, AdmissionPolicy, Admit, Hold, Skip
from pegboard.contracts.chunk_policy import ChunkPolicy
from pegboard.contracts.preemption_policy import BlockNeed, PreemptionMode, PreemptionPolicy
from pegboard.contracts.views import RequestView, SchedulingView
from pegboard_plugins.scheduling.policy_guard import PolicyGuard


@dataclass(slots=True)
class Policies:
    """Every answer that leaves here is usable: the policy's own where it makes sense, else the default decision."""

    guard: PolicyGuard
    admission: AdmissionPolicy
    chunk: ChunkPolicy
    preemption: PreemptionPolicy

    def admit(self, request: RequestView, context: SchedulingView) -> Admission:
        """Default: admit."""
        answer = self.guard.ask(self.admission, self.admission.admit, request, context, default=None)
        if answer is None or isinstance(answer, Hold | Skip):
            return Admit() if answer is None else answer
        if (
            isinstance(answer, Admit)
            and _is_count(answer.reserve_blocks)
            and (answer.max_tokens is None or _is_count(answer.max_tokens))
        ):
            return answer
        self.guard.refuse(self.admission, "admit", answer, "Admit with counts, Hold, Skip or None")
        return Admit()

    def chunk_tokens(self, request: RequestView, remaining: int, context: SchedulingView) -> int:
        """Between 0 and what remains and fits the budget. Default: as many as fit."""
        available = min(remaining, context.token_budget)
        answer = self.guard.ask(self.chunk, self.chunk.chunk_tokens, request, remaining, context, default=None)
        if answer is None:
            return available
        if isinstance(answer, int):
            return max(0, min(available, answer))
        self.guard.refuse(self.chunk, "chunk_tokens", answer, "a number of tokens or None")
        return available

    def victims(self, need: BlockNeed, candidates: Sequence[RequestView], context: SchedulingView) -> list[str]:
        """All candidates in the order in which they give way: the policy's first, then the youngest of the others first."""
        answer = self.guard.ask(self.preemption, self.preemption.victims, need, candidates, context, default=None)
        chosen = [] if answer is None else self._ids("victims", answer, candidates)
        rest = [view.request_id for view in reversed(candidates)]
        return list(dict.fromkeys(chosen + rest))

    @property
    def preempts_proactively(self) -> bool:
        """False for the many policies that leave ``proactive`` alone: then no views are made for it in each step."""
        return getattr(type(self.preemption), "proactive", None) is not PreemptionPolicy.proactive

    def proactive(self, candidates: Sequence[RequestView], context: SchedulingView) -> list[str]:
        """Default: nobody."""
        nobody: Sequence[str] = ()
        answer = self.guard.ask(self.preemption, self.preemption.proactive, candidates, context, default=nobody)
        return self._ids("proactive", answer, candidates)

    def mode(self, request: RequestView) -> PreemptionMode:
        """Default: recompute."""
        answer = self.guard.ask(self.preemption, self.preemption.mode, request, default=None)
        if answer not in (None, "recompute", "swap"):
            self.guard.refuse(self.preemption, "mode", answer, "'recompute', 'swap' or None")
            return "recompute"
        return answer or "recompute"

    def _ids(self, question: str, answer: object, candidates: Sequence[RequestView]) -> list[str]:
        """Those of the answer that name a candidate, each once."""
        if isinstance(answer, str) or not isinstance(answer, Iterable):
            self.guard.refuse(self.preemption, question, answer, "a sequence of request ids")
            return []
        known = {view.request_id for view in candidates}
        try:
            return list(dict.fromkeys(request_id for request_id in answer if request_id in known))
        except Exception as error:  # a lazy answer may raise here, or hold what cannot be hashed
            self.guard.refuse(self.preemption, question, answer, f"a sequence of request ids ({error!r})")
            return []


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 0
