"""Conformance of an AdmissionPolicy. Subclass and give ``make``."""

from __future__ import annotations

import abc

from hypothesis import given

from pegboard.contracts.admission_policy import AdmissionPolicy, Admit, Hold, Skip
from pegboard.contracts.views import RequestView, SchedulingView
from pegboard.testing.conformance._views import QUICK, request_views, scheduling_views


class AdmissionPolicyConformance(abc.ABC):
    @abc.abstractmethod
    def make(self) -> AdmissionPolicy: ...

    def test_it_answers_in_any_situation(self) -> None:
        policy = self.make()

        @QUICK
        @given(request_views(), scheduling_views())
        def run(request: RequestView, context: SchedulingView) -> None:
            answer = policy.admit(request, context)
            assert answer is None or isinstance(answer, Admit | Hold | Skip)
            if isinstance(answer, Admit):
                assert isinstance(answer.reserve_blocks, int)
                assert answer.reserve_blocks >= 0
                assert answer.max_tokens is None or (isinstance(answer.max_tokens, int) and answer.max_tokens >= 0)

        run()

    def test_it_is_pure(self) -> None:
        policy, other = self.make(), self.make()

        @QUICK
        @given(request_views(), scheduling_views())
        def run(request: RequestView, context: SchedulingView) -> None:
            answer = policy.admit(request, context)
            assert policy.admit(request, context) == answer
            assert other.admit(request, context) == answer

        run()
