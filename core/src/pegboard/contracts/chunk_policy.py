"""ChunkPolicy: how many prompt tokens of a long prefill go into this step?"""

from __future__ import annotations

import abc
from typing import Final

from pegboard.contracts.views import RequestView, SchedulingView

API: Final = 1


class ChunkPolicy(abc.ABC):
    """Asked for each request with more than one token to compute.

    Invariants: pure; the answer is clamped to ``[0, min(remaining, context.token_budget)]`` by core; 0 leaves the request
    out of this step, except that core takes 1 where nothing else would be scheduled.
    """

    @abc.abstractmethod
    def chunk_tokens(self, request: RequestView, remaining: int, context: SchedulingView) -> int | None:
        """Tokens to compute now. None abstains: as many as fit the budget."""
