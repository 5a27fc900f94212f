"""Strategies and helpers that several conformance classes share. They need hypothesis."""

from __future__ import annotations

from typing import Final

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from pegboard.contracts.views import RequestView, SchedulingView

QUICK: Final = settings(
    max_examples=50, stateful_step_count=40, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
"""Seconds, not minutes. Hypothesis makes it repeatable by itself where the environment says that this is a CI run."""


def view(request_id: str, **fields: float) -> RequestView:
    values: dict[str, float] = {"arrival_time": 0.0, "num_prompt_tokens": 8, "max_tokens": 16, **fields}
    return RequestView(request_id, **values)  # type: ignore[arg-type]


@st.composite
def request_views(draw: st.DrawFn, request_id: str | None = None) -> RequestView:
    """Any request, waiting or running."""
    count = st.integers(0, 5000)
    num_prompt = draw(st.integers(1, 5000))
    num_output = draw(count)
    return RequestView(
        request_id=request_id if request_id is not None else draw(st.text(min_size=1, max_size=5)),
        arrival_time=draw(st.floats(0, 2e9)),
        priority=draw(st.integers(-5, 5)),
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        num_computed_tokens=draw(st.integers(0, num_prompt + num_output - 1)),
        max_tokens=draw(st.integers(1, 5000)),
        num_blocks=draw(count),
        num_preemptions=draw(st.integers(0, 20)),
    )


@st.composite
def scheduling_views(draw: st.DrawFn) -> SchedulingView:
    """Any situation, an idle engine and a full pool among them."""
    num_blocks = draw(st.integers(1, 10_000))
    max_num_seqs = draw(st.integers(1, 256))
    return SchedulingView(
        step=draw(st.integers(1, 1_000_000)),
        now=draw(st.floats(0, 2e9)),
        token_budget=draw(st.integers(1, 8192)),
        num_running=draw(st.integers(0, max_num_seqs)),
        num_waiting=draw(st.integers(0, 1000)),
        max_num_seqs=max_num_seqs,
        num_blocks=num_blocks,
        num_free_blocks=draw(st.integers(0, num_blocks)),
        block_size=draw(st.sampled_from((1, 16, 32))),
    )
