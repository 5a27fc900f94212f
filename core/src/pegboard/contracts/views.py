"""Frozen views that policies get. A policy returns ids, numbers or None (abstain: the default decides); core mutates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request as a policy sees it. Token counts in tokens, ``arrival_time`` in seconds of ``time.time()``."""

    request_id: str
    arrival_time: float
    priority: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    max_tokens: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0
    ext: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens


@dataclass(frozen=True, slots=True)
class SchedulingView:
    """The scheduler's situation while it plans a step."""

    step: int
    now: float
    token_budget: int
    """Tokens that this step may still schedule."""
    num_running: int
    num_waiting: int
    max_num_seqs: int
    num_blocks: int
    num_free_blocks: int
    block_size: int
    strict: bool = False

    @property
    def kv_usage(self) -> float:
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0
