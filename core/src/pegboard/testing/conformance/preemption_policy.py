"""Conformance of a PreemptionPolicy. Subclass and give ``make``."""

from __future__ import annotations

import abc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.contracts.preemption_policy import BlockNeed, PreemptionPolicy
from pegboard.contracts.views import RequestView, SchedulingView
from pegboard.testing.conformance._views import QUICK, request_views, scheduling_views, view

_CANDIDATES = st.integers(1, 6).flatmap(lambda n: st.tuples(*(request_views(f"r{i}") for i in range(n))))


class PreemptionPolicyConformance(abc.ABC):
    @abc.abstractmethod
    def make(self) -> PreemptionPolicy: ...

    def test_victims_are_candidates_each_once(self) -> None:
        policy, other = self.make(), self.make()

        @QUICK
        @given(_CANDIDATES, st.integers(1, 1000), scheduling_views(), st.data())
        def run(candidates: tuple[RequestView, ...], count: int, context: SchedulingView, data: st.DataObject) -> None:
            ids = [c.request_id for c in candidates]
            need = BlockNeed(data.draw(st.sampled_from([*ids, "the oldest"])), count)
            answer = policy.victims(need, candidates, context)
            if answer is not None:
                assert not isinstance(answer, str)
                assert set(answer) <= set(ids)
                assert len(set(answer)) == len(answer)
                assert list(policy.victims(need, candidates, context) or ()) == list(answer)
                assert list(other.victims(need, candidates, context) or ()) == list(answer)

        run()

    @pytest.mark.parametrize("count", [1, 2, 300])
    def test_one_or_many_candidates(self, count: int) -> None:
        candidates = [view(f"r{i}", num_blocks=i) for i in range(count)]
        context = SchedulingView(1, 0.0, 64, count + 1, 0, 512, 1000, 0, 16)
        answer = self.make().victims(BlockNeed("r0", 1), candidates, context)
        assert answer is None or set(answer) <= {c.request_id for c in candidates}

    def test_the_mode_is_one_of_those_that_there_are(self) -> None:
        policy = self.make()

        @QUICK
        @given(request_views())
        def run(request: RequestView) -> None:
            assert policy.mode(request) in (None, "recompute", "swap")

        run()

    def test_proactive_victims_are_candidates(self) -> None:
        policy = self.make()

        @QUICK
        @given(_CANDIDATES, scheduling_views())
        def run(candidates: tuple[RequestView, ...], context: SchedulingView) -> None:
            answer = policy.proactive(candidates, context)
            assert not isinstance(answer, str)
            assert set(answer) <= {c.request_id for c in candidates}

        run()
