"""What the engine core sends to the front end."""

from __future__ import annotations

from typing import Any

import msgspec

from pegboard.wire.model_output import Logprobs
from pegboard.wire.request import FinishReason


class EngineCoreOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """News of one request after a step. The last message of a request has ``finish_reason``; there is exactly one.

    ``prompt_logprobs``: entries for all prompt tokens but the first, once, with the first new token.
    ``stop_reason`` is the stop token id that ended it, or the message of an error.
    """

    request_id: str
    new_token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[Logprobs] = msgspec.field(default_factory=list)
    prompt_logprobs: list[Logprobs] = msgspec.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    ext: dict[str, Any] = msgspec.field(default_factory=dict)


class SchedulerStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Gauges and counters of a scheduler at one moment. Counters run from engine start."""

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    kv_usage: float = 0.0
    """Share of usable blocks held by requests, 0 to 1; cached but unreferenced blocks count as free."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    num_preemptions: int = 0
    num_passed_blocks: int = 0
    """KV blocks that unfinished requests have given up because the sliding windows of their layers had passed them."""
    num_scheduled_tokens: int = 0
    degraded: list[str] = msgspec.field(default_factory=list)
    """Policies that raised and were replaced by the default decision, with the error."""


class EngineCoreOutputs(msgspec.Struct, kw_only=True, omit_defaults=True):
    """All news of one step."""

    outputs: list[EngineCoreOutput] = msgspec.field(default_factory=list)
    stats: SchedulerStats | None = None
