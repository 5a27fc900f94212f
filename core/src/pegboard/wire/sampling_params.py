"""How one request wants its tokens chosen and when it wants to stop."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from pegboard.wire.output_kind import OutputKind
from pegboard.wire.structured_outputs import StructuredOutputs

MAX_LOGPROBS = 20
"""Most alternatives that may be asked for per token, the limit of the OpenAI API."""
MAX_N = 1024
"""Most answers to one prompt. Each is a request of its own in the engine."""
MAX_TOKEN_ID = 2**31 - 1
"""No vocabulary is larger; whether an id is in the model's is checked where that is known."""
MAX_BIAS = 100.0
"""Limit of a logit bias either way, that of the OpenAI API: enough to forbid or to force a token."""
MAX_COUNT = 2**31 - 1
"""Limit of counts of tokens that have none of their own: parts keep them in 32 bits."""
_NUMBERS: Final = (
    *("n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"),
    *("max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens", "priority"),
)
_PLAIN: Final = frozenset({int, float, bool, type(None)})


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Choice and stopping rules of one request. Immutable; checked when made.

    How many:
        ``n`` answers, each equal to a request of its own with ``seed + i``.

    Choice (the sampler's documentation gives the order of operations):
        ``temperature`` 0 (or anything up to ``GREEDY_TEMPERATURE``) is greedy. ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 are
        off. ``repetition_penalty`` looks at prompt and output, ``presence_penalty`` and ``frequency_penalty`` at the output.
        ``seed`` makes the draws of this request a function of (seed, output position, token id) alone. ``logit_bias``: token id
        to what is added to its logit. ``allowed_token_ids``: no other id is chosen. ``bad_words``: texts that must not appear.
        ``structured_outputs``: the answer belongs to a language.

    End:
        ``max_tokens`` None means "until the context is full". Before ``min_tokens`` tokens neither a stop token nor a stop
        string ends it. ``stop``: texts; ``include_stop_str_in_output`` keeps the text in the answer. ``ignore_eos``: the model's
        own end-of-sequence ids don't end it.

    Report:
        ``logprobs`` is the number of alternatives reported per token, the chosen one always included; ``prompt_logprobs`` the
        same for the tokens of the prompt. Values are log-softmax of the raw logits, before temperature, bias and penalties.
        ``detokenize`` False leaves ``text`` empty. ``echo``: the text begins with that of the prompt. ``output_kind``: how
        pieces are reported. ``spaces_between_special_tokens`` False: adjacent special tokens that are shown get no space
        between them.

    Prompt and place:
        ``truncate_prompt_tokens`` k keeps the last k tokens of the prompt, -1 as many as the context takes. ``cache_salt``:
        cached prefixes are shared among equal salts only. ``priority``: smaller is served earlier, where the queue looks at it.
        ``ext``: plugin name to that plugin's own fields.

    Raises:
        ValueError: a field is out of its range; the message names field, value and range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputs | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    echo: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: OutputKind = OutputKind.CUMULATIVE
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    priority: int = 0
    ext: dict[str, Any] = msgspec.field(default_factory=dict)

    GREEDY_TEMPERATURE = 1e-4

    def __post_init__(self) -> None:
        change = msgspec.structs.force_setattr
        for name in _NUMBERS:
            if type(getattr(self, name)) not in _PLAIN:
                change(self, name, _plain(getattr(self, name)))
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            change(self, name, (value,) if isinstance(value, str) else _sequence(name, value))
        change(self, "stop_token_ids", tuple(map(_plain, _sequence("stop_token_ids", self.stop_token_ids))))
        if self.allowed_token_ids is not None:
            change(self, "allowed_token_ids", tuple(map(_plain, _sequence("allowed_token_ids", self.allowed_token_ids))))
        if isinstance(self.logit_bias, Mapping):  # a copy, which nobody can change any more
            change(self, "logit_bias", {_plain(token_id): _plain(value) for token_id, value in self.logit_bias.items()})
        if isinstance(self.output_kind, str):
            change(self, "output_kind", _output_kind(self.output_kind))
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
        return [*self._choice_problems(), *self._end_problems(), *self._report_problems(), *self._place_problems()]

    def _choice_problems(self) -> list[str | None]:
        return [
            _integer("n", self.n, 1, MAX_N),
            _number("temperature", self.temperature, 0.0, 1e6),
            _integer("top_k", self.top_k, -1),
            _number("top_p", self.top_p, 0.0, 1.0, low_open=True),
            _number("min_p", self.min_p, 0.0, 1.0),
            _number("repetition_penalty", self.repetition_penalty, 1e-3, 1e3),
            _number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            None if self.seed is None else _integer("seed", self.seed, -(2**63), 2**64 - 1),
            _bias_problem(self.logit_bias),
            self._allowed_problem(),
            _texts_problem("bad_words", self.bad_words),
            None
            if self.structured_outputs is None or isinstance(self.structured_outputs, StructuredOutputs)
            else f"structured_outputs={self.structured_outputs!r:.80} must be a StructuredOutputs",
        ]

    def _end_problems(self) -> list[str | None]:
        return [
            None if self.max_tokens is None else _integer("max_tokens", self.max_tokens, 1),
            _integer("min_tokens", self.min_tokens, 0),
            _texts_problem("stop", self.stop),
            _ids_problem("stop_token_ids", self.stop_token_ids),
            self._min_max_problem(),
            *(_boolean(name, getattr(self, name)) for name in ("include_stop_str_in_output", "ignore_eos")),
        ]

    def _report_problems(self) -> list[str | None]:
        shown = ("detokenize", "echo", "skip_special_tokens", "spaces_between_special_tokens")
        return [
            None if self.logprobs is None else _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS),
            None if self.prompt_logprobs is None else _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS),
            *(_boolean(name, getattr(self, name)) for name in shown),
            "stop strings need text; leave detokenize on, or use stop_token_ids" if self.stop and not self.detokenize else None,
            "echo needs text; leave detokenize on" if self.echo is True and self.detokenize is False else None,
            None if isinstance(self.output_kind, OutputKind) else f"output_kind={self.output_kind!r} must be an OutputKind",
        ]

    def _place_problems(self) -> list[str | None]:
        return [
            self._truncate_problem(),
            cache_salt_problem(self.cache_salt),
            _integer("priority", self.priority, -(2**63), 2**63 - 1),
            None if isinstance(self.ext, dict) else f"ext={self.ext!r:.80} must be a dict from plugin names to their fields",
        ]

    def _allowed_problem(self) -> str | None:
        if self.allowed_token_ids is None:
            return None
        if not self.allowed_token_ids:
            return "allowed_token_ids is empty, so that nothing could be chosen; give at least one id, or leave it out"
        return _ids_problem("allowed_token_ids", self.allowed_token_ids)

    def _truncate_problem(self) -> str | None:
        if self.truncate_prompt_tokens is None:
            return None
        problem = _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
        zero = "truncate_prompt_tokens=0 leaves no prompt; give at least 1, or -1 for as many as the context takes"
        return problem or (zero if self.truncate_prompt_tokens == 0 else None)

    def _min_max_problem(self) -> str | None:
        if isinstance(self.max_tokens, int) and isinstance(self.min_tokens, int) and self.min_tokens > self.max_tokens:
            return f"min_tokens={self.min_tokens} is larger than max_tokens={self.max_tokens}"
        return None


def _output_kind(text: str) -> OutputKind:
    try:
        return OutputKind(text)
    except ValueError:
        known = ", ".join(repr(kind.value) for kind in OutputKind)
        raise ValueError(f"invalid SamplingParams: output_kind={text!r:.80} must be one of {known}") from None


def cache_salt_problem(salt: Any) -> str | None:
    """Why ``salt`` cannot be a ``cache_salt``, or None."""
    if salt is None or (isinstance(salt, str) and salt):
        return None
    return f"cache_salt={salt!r:.80} must be a non-empty string; leave it out to share cached prefixes"


def _texts_problem(name: str, texts: tuple[Any, ...]) -> str | None:
    for text in texts:
        if not isinstance(text, str) or not text:
            return f"{name} entries must be non-empty strings, got {text!r:.80}"
        if _broken(text):
            return f"{name} entries must be made of characters; {text!r:.80} has half of a surrogate pair in it"
    return None


def _broken(text: str) -> bool:
    """Whether there is half of a surrogate pair in it, which is no character and which no model says."""
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _ids_problem(name: str, ids: tuple[Any, ...]) -> str | None:
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= MAX_TOKEN_ID):
        return None
    return next((p for token_id in ids if (p := _integer(name, token_id, 0, MAX_TOKEN_ID))), None)


def _bias_problem(bias: Any) -> str | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        return f"logit_bias={bias!r:.80} must be a dict from token ids to numbers"
    problem = _ids_problem("a token id in logit_bias", tuple(bias))
    if problem:
        return problem
    for token_id, value in bias.items():
        if type(value) is not float or not -MAX_BIAS <= value <= MAX_BIAS:
            problem = _number(f"logit_bias[{token_id!r}]", value, -MAX_BIAS, MAX_BIAS)
            if problem:
                return problem
    return None


def _boolean(name: str, value: object) -> str | None:
    return None if isinstance(value, bool) else f"{name}={value!r:.80} must be true or false"


def _sequence(name: str, value: Any) -> tuple[Any, ...]:
    """``value`` as a tuple; None is none."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ValueError(f"invalid SamplingParams: {name}={value!r:.80} must be a list")
    return tuple(value)


def _plain(value: Any) -> Any:
    """Numbers of other libraries (numpy's, say) as Python's own, which every process understands; anything else as it is."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> str | None:
    bracket = "(" if low_open else "["
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (isinstance(value, float) and not math.isfinite(value)):
        return f"{name}={value!r:.80} must be a finite number in {bracket}{low:g}, {high:g}]"
    if value < low or value > high or (low_open and value == low):
        return f"{name}={value!r:.80} must be in {bracket}{low:g}, {high:g}]"
    return None


def _integer(name: str, value: object, low: int, high: int | None = None) -> str | None:
    limit = f"at least {low}" if high is None else f"between {low} and {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        return f"{name}={value!r:.80} must be an integer {limit}"
    if high is None and value > MAX_COUNT:
        return f"{name}={value!r:.80} must be at most {MAX_COUNT}"
    if value < low or (high is not None and value > high):
        return f"{name}={value!r:.80} must be {limit}"
    return None
