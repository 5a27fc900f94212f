"""What a caller gets back: RequestOutput and its parts. Plain data, safe to keep, pickle and print."""

from __future__ import annotations

import builtins
from dataclasses import dataclass, field
from typing import Any

from pegboard.wire import FinishReason, OutputKind

__all__ = ["CompletionOutput", "EchoedPrompt", "Logprob", "OutputKind", "RequestMetrics", "RequestOutput"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability: log-softmax of the raw logits. ``rank`` counts from 1 over the whole vocabulary.

    ``bytes`` is what the token stands for inside a text, None for special tokens. ``decoded_token`` is that as text, a leading
    space included; for a token that is not made of whole characters the bytes, written as ``bytes:\\xf0\\x9f``; for a special
    token its name. Both are None where the request has ``detokenize`` off.
    """

    logprob: float
    rank: int
    decoded_token: str | None
    bytes: builtins.bytes | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One answer. ``token_ids`` includes the end-of-sequence or stop token that ended it; ``text`` does not.

    ``logprobs`` has one dict per token, from token id to ``Logprob``: the chosen token first, then the alternatives in
    falling order; None when none were asked for. ``text_offsets``, None with it, has for each token the place in the answer's
    whole text at which it begins, in characters; for a token that goes on with a character that an earlier one began, the place
    of that character. ``stop_reason`` is the stop string or the request's own stop token id that ended it, the message of an
    error, and None for an end-of-sequence token or a limit. ``with_prompt``: ``text`` begins with that of the prompt (``echo``).
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text_offsets: list[int] | None = None
    with_prompt: bool = False

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Moments of a request in seconds of ``time.time()``; None until they happen. A preemption changes none of them. With several
    answers: the first token of any, the last of any, and the end of all; ``num_preemptions`` counts those of all."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """The prompt's text, with which an answer's text begins. ``tokens`` (names as ``Logprob.decoded_token``) and ``offsets`` (as
    ``CompletionOutput.text_offsets``) have an entry per prompt token where prompt logprobs are asked for, else none."""

    text: str
    tokens: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)


@dataclass(slots=True)
class RequestOutput:
    """News of one request. ``prompt`` is None when the request came as token ids.

    ``outputs`` are its answers in order of their ``index``: all ``n`` of them, or for ``OutputKind.DELTA`` those with news.
    ``finished`` when all have ended. ``num_cached_tokens`` of the prompt were found in the prefix cache. ``prompt_logprobs``,
    where asked for, has None for the first token of the prompt and then a dict per token as in ``CompletionOutput.logprobs``;
    None when the request ended before they were known. ``echo``: what ``echo`` put before the answers. ``ext`` holds what parts
    add, by plugin name.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    ext: dict[str, Any] = field(default_factory=dict)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    echo: EchoedPrompt | None = None

    @property
    def text(self) -> str:
        """Text of the first answer, "" where there is no news of it."""
        return next((answer.text for answer in self.outputs if answer.index == 0), "")
