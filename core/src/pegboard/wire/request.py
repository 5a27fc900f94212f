"""What the front end sends to the engine core, and how a request can end."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from pegboard.wire.sampling_params import SamplingParams
from pegboard.wire.structured_outputs import GrammarSpec


class FinishReason(enum.StrEnum):
    """Why a request ended, as reported to its caller."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """``max_tokens`` or the context limit was reached."""
    ABORT = "abort"
    """The caller aborted it."""
    ERROR = "error"
    """It failed alone; ``stop_reason`` holds the message."""


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tokenized, checked request on its way to the engine core.

    ``stop_token_ids`` are the ids that end it (end-of-sequence ids joined with the request's own), already resolved by
    the front end. ``max_tokens`` is final: the context limit is applied. ``sampling`` always has a seed, ``n`` 1, and no
    ``structured_outputs``: what that asked for is ``grammar``. ``bad_word_ids``: token sequences that must not be completed.

    Requests with one ``group`` are answers to one prompt: their prompts are equal, and a scheduler may compute it once.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    stop_token_ids: list[int]
    max_tokens: int
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    bad_word_ids: list[list[int]] = msgspec.field(default_factory=list)
    grammar: GrammarSpec | None = None
    group: str | None = None
    ext: dict[str, Any] = msgspec.field(default_factory=dict)
