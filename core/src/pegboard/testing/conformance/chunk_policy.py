"""Conformance of a ChunkPolicy. Subclass and give ``make``."""

from __future__ import annotations

import abc

from hypothesis import given
from hypothesis import strategies as st

from pegboard.contracts.chunk_policy import ChunkPolicy
from pegboard.contracts.views import RequestView, SchedulingView
from pegboard.testing.conformance._views import QUICK, request_views, scheduling_views, view


class ChunkPolicyConformance(abc.ABC):
    @abc.abstractmethod
    def make(self) -> ChunkPolicy: ...

    def test_it_answers_in_any_situation_and_is_pure(self) -> None:
        policy, other = self.make(), self.make()

        @QUICK
        @given(request_views(), st.integers(2, 10_000), scheduling_views())
        def run(request: RequestView, remaining: int, context: SchedulingView) -> None:
            answer = policy.chunk_tokens(request, remaining, context)
            assert answer is None or isinstance(answer, int)
            assert policy.chunk_tokens(request, remaining, context) == answer
            assert other.chunk_tokens(request, remaining, context) == answer

        run()

    def test_a_prompt_is_through_after_a_finite_number_of_chunks(self) -> None:
        policy = self.make()

        @QUICK
        @given(st.integers(2, 5000), scheduling_views())
        def run(remaining: int, context: SchedulingView) -> None:
            request = view("r", num_prompt_tokens=remaining)
            for _ in range(remaining):
                answer = policy.chunk_tokens(request, remaining, context)
                available = min(remaining, context.token_budget)
                remaining -= available if answer is None else max(0, min(available, answer))
                if remaining <= 1:
                    return
            raise AssertionError(f"{remaining} tokens are left after as many steps as there were tokens")

        run()
