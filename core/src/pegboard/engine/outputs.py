"""What a caller gets back: RequestOutput and its parts. Plain data, safe to keep, pickle and print."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pegboard.wire import FinishReason, OutputKind

__all__ = ["CompletionOutput", "Logprob", "OutputKind", "RequestMetrics", "RequestOutput"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability: log-softmax of the raw logits. ``rank`` counts from 1 over the whole vocabulary."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One answer. ``token_ids`` includes the end-of-sequence or stop token that ended it; ``text`` does not.

    ``logprobs`` has one dict per token, from token id to ``Logprob``: the chosen token first, then the alternatives in
    falling order; None when none were asked for. ``stop_reason`` is the stop string or the request's own stop token id
    that ended it, the message of an error, and None for an end-of-sequence token or a limit.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Moments of a request in seconds of ``time.time()``; None until they happen. A preemption changes none of them."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """News of one request. ``prompt`` is None when the request came as token ids.

    ``num_cached_tokens`` of the prompt were found in the prefix cache. ``ext`` holds what parts add, by plugin name.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    ext: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text
