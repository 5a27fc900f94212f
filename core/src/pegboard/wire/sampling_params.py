"""How one request wants its tokens chosen and when it wants to stop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

MAX_LOGPROBS = 20
"""Most alternatives that may be asked for per token, the limit of the OpenAI API."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Choice and stopping rules of one request. Immutable; checked when made.

    ``temperature`` 0 (or anything up to ``GREEDY_TEMPERATURE``) is greedy. ``top_k`` 0 or -1 and ``top_p`` 1 are off.
    ``max_tokens`` None means "until the context is full". ``seed`` makes the draws of this request a function of
    (seed, output position) alone. ``logprobs`` is the number of alternatives reported per token, the chosen one
    always included; values are log-softmax of the raw logits, before temperature and penalties.

    Raises:
        ValueError: a field is out of its range; the message names field, value and range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    ext: dict[str, Any] = msgspec.field(default_factory=dict)

    GREEDY_TEMPERATURE = 1e-4

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "stop", (self.stop,) if isinstance(self.stop, str) else _sequence("stop", self.stop))
        msgspec.structs.force_setattr(self, "stop_token_ids", _sequence("stop_token_ids", self.stop_token_ids))
        problems = [p for p in self._problems() if p]
        if problems:
            raise ValueError("invalid SamplingParams: " + "; ".join(problems))

    @property
    def greedy(self) -> bool:
        """True when the highest logit is always taken."""
        return self.temperature <= self.GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def _problems(self) -> list[str | None]:
        return [
            _number("temperature", self.temperature, 0.0, 1e6),
            _integer("top_k", self.top_k, -1),
            _number("top_p", self.top_p, 0.0, 1.0, low_open=True),
            _number("min_p", self.min_p, 0.0, 1.0),
            _number("repetition_penalty", self.repetition_penalty, 0.0, 1e3, low_open=True),
            _number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            None if self.seed is None else _integer("seed", self.seed, -(2**63), 2**64 - 1),
            None if self.max_tokens is None else _integer("max_tokens", self.max_tokens, 1),
            _integer("min_tokens", self.min_tokens, 0),
            None if self.logprobs is None else _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS),
            self._stop_problem(),
            next((p for t in self.stop_token_ids if (p := _integer("stop_token_ids", t, 0))), None),
            self._min_max_problem(),
            None if isinstance(self.ext, dict) else f"ext={self.ext!r} must be a dict from plugin names to their fields",
        ]

    def _stop_problem(self) -> str | None:
        for text in self.stop:
            if not isinstance(text, str) or not text:
                return f"stop entries must be non-empty strings, got {text!r}"
        return None

    def _min_max_problem(self) -> str | None:
        if isinstance(self.max_tokens, int) and isinstance(self.min_tokens, int) and self.min_tokens > self.max_tokens:
            return f"min_tokens={self.min_tokens} is larger than max_tokens={self.max_tokens}"
        return None


def _sequence(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ValueError(f"invalid SamplingParams: {name}={value!r} must be a list")
    return tuple(value)


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> str | None:
    bracket = "(" if low_open else "["
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return f"{name}={value!r} must be a finite number in {bracket}{low:g}, {high:g}]"
    if value < low or value > high or (low_open and value == low):
        return f"{name}={value!r} must be in {bracket}{low:g}, {high:g}]"
    return None


def _integer(name: str, value: object, low: int, high: int | None = None) -> str | None:
    limit = f"at least {low}" if high is None else f"between {low} and {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        return f"{name}={value!r} must be an integer {limit}"
    if value < low or (high is not None and value > high):
        return f"{name}={value!r} must be {limit}"
    return None


Ext = Mapping[str, Any]
"""An extension slot: data of plugins, keyed by plugin name."""
