"""Input processing: from a prompt and sampling parameters to a checked EngineCoreRequest. What is wrong with a request
is found here, before it can meet others."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pegboard.contracts.tokenizer import Tokenizer
from pegboard.engine.info import EngineInfo
from pegboard.engine.prompts import Messages, ParsedPrompt, check_messages, check_token_ids, parse_prompt
from pegboard.wire import EngineCoreRequest, SamplingParams

Validate = Callable[[EngineCoreRequest], None]
"""Raises ``ValueError`` for what a plugin refuses."""


@dataclass(frozen=True, slots=True)
class ProcessedInput:
    """A request for the core, and the text it came from (None for token ids)."""

    request: EngineCoreRequest
    prompt: str | None


class InputProcessor:
    """Turns prompts into requests. Thread-safe as far as the tokenizer is; holds nothing of a request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        info: EngineInfo,
        eos_token_ids: Sequence[int] = (),
        known_ext: Collection[str] = (),
        validate: Validate | None = None,
    ) -> None:
        """``known_ext``: plugin names whose extension fields a request may carry."""
        self._tokenizer, self._info = tokenizer, info
        self._eos = tuple(eos_token_ids)
        self._known_ext = frozenset(known_ext)
        self._validate = validate

    def process(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        ext: Mapping[str, Any] | None = None,
    ) -> ProcessedInput:
        """Check everything and tokenize. ``prompt``: see ``pegboard.engine.prompts.Prompt``; extras in a prompt dict win.

        Raises:
            ValueError: naming the field, its value, the limit and what to do.
        """
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id={request_id!r} must be a non-empty string")
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, got {type(params).__name__}")
        parsed = parse_prompt(prompt)
        token_ids = self._token_ids(parsed)
        extensions = {**params.ext, **_check_mapping(ext), **_check_mapping(parsed.extras.get("ext"))}
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling=params,
            stop_token_ids=self._stop_token_ids(params),
            max_tokens=self._max_tokens(len(token_ids), params),
            arrival_time=time.time() if arrival_time is None else arrival_time,
            priority=_check_priority(parsed.extras.get("priority", priority)),
            cache_salt=_check_salt(parsed.extras.get("cache_salt", cache_salt)),
            ext=self._check_ext(extensions),
        )
        if self._validate is not None:
            self._validate(request)
        return ProcessedInput(request, parsed.text)

    def render_chat(self, messages: Messages, **template_arguments: Any) -> list[int]:
        """Token ids of a conversation. ``template_arguments``: see ``Tokenizer.apply_chat_template``.

        Raises ``ValueError`` for messages that are none, and ``ChatTemplateError``.
        """
        return self._tokenizer.apply_chat_template(check_messages(messages), **template_arguments)

    def _token_ids(self, parsed: ParsedPrompt) -> list[int]:
        if parsed.text is not None:
            name, token_ids = "prompt", self._tokenizer.encode(parsed.text)
        elif parsed.messages is not None:
            name, token_ids = "messages", self.render_chat(parsed.messages)
        else:
            assert parsed.token_ids is not None
            name, token_ids = "prompt_token_ids", list(parsed.token_ids)
        if not token_ids:
            raise ValueError(f"{name} is empty (zero tokens); give at least one token")
        return check_token_ids(name if name == "prompt_token_ids" else f"tokens of {name}", token_ids, self._info.vocab_size)

    def _max_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        """``max_tokens`` with the context limit applied."""
        limit, reason = self._info.max_tokens, self._info.reason
        room = limit - prompt_len
        if room < 1:
            raise ValueError(
                f"the prompt has {prompt_len} tokens and leaves no room for output; the limit for prompt and output is "
                f"{reason}; shorten the prompt to at most {limit - 1} tokens"
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise ValueError(
                f"prompt of {prompt_len} tokens + max_tokens={params.max_tokens} = {prompt_len + params.max_tokens} tokens "
                f"is over the limit of {reason}; lower max_tokens to at most {room}, or give None for as many as fit"
            )
        if params.min_tokens > room:
            raise ValueError(
                f"min_tokens={params.min_tokens} after a prompt of {prompt_len} tokens is over the limit of {reason}; "
                f"lower min_tokens to at most {room}"
            )
        return room if params.max_tokens is None else params.max_tokens

    def _stop_token_ids(self, params: SamplingParams) -> list[int]:
        own = check_token_ids("stop_token_ids", params.stop_token_ids, self._info.vocab_size)
        return list(dict.fromkeys(own if params.ignore_eos else [*self._eos, *own]))

    def _check_ext(self, ext: Mapping[str, Any]) -> dict[str, Any]:
        for key in ext:
            if key not in self._known_ext:
                known = ", ".join(sorted(self._known_ext)) or "none is active"
                raise ValueError(f"unknown extension field {key!r} in ext; fields are named for active plugins ({known})")
        return dict(ext)


def _check_mapping(ext: Any) -> Mapping[str, Any]:
    if ext is not None and not isinstance(ext, Mapping):
        raise ValueError(f"ext={ext!r:.80} must be a dict from plugin names to their fields")
    return ext or {}


def _check_priority(priority: Any) -> int:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ValueError(f"priority={priority!r} must be an integer; smaller is served earlier")
    return priority


def _check_salt(salt: Any) -> str | None:
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ValueError(f"cache_salt={salt!r} must be a non-empty string; leave it out to share cached prefixes")
    return salt
