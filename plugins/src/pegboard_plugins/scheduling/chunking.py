"""DefaultChunking: fill the step's budget, but never with one long prompt alone."""

from __future__ import annotations

from pegboard.config.models import EngineConfig
from pegboard.contracts.chunk_policy import ChunkPolicy
from pegboard.contracts.views import RequestView, SchedulingView


class DefaultChunking(ChunkPolicy):
    """As many tokens as fit, at most ``scheduler.long_prefill_token_threshold`` of one prompt per step (0: no such limit)."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.threshold = config.scheduler.long_prefill_token_threshold if config is not None else 0

    def chunk_tokens(self, request: RequestView, remaining: int, context: SchedulingView) -> int | None:
        return min(remaining, self.threshold) if self.threshold else None
