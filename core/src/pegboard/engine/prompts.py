"""The forms a prompt may come in, and the checks that need no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypedDict

from pegboard.plugins.suggestions import did_you_mean

Messages: TypeAlias = Sequence[Mapping[str, Any]]


class TextPrompt(TypedDict, total=False):
    """``{"prompt": "text"}`` with optional extras."""

    prompt: str
    cache_salt: str
    priority: int
    ext: Mapping[str, Any]


class TokensPrompt(TypedDict, total=False):
    """``{"prompt_token_ids": [1, 2, 3]}`` with optional extras."""

    prompt_token_ids: Sequence[int]
    cache_salt: str
    priority: int
    ext: Mapping[str, Any]


Prompt: TypeAlias = str | Sequence[int] | Messages | TextPrompt | TokensPrompt | Mapping[str, Any]
"""Text, token ids, chat messages, or a dict with exactly one of prompt, prompt_token_ids and messages, and extras."""

_FORMS = ("prompt", "prompt_token_ids", "messages")
_EXTRAS = ("cache_salt", "priority", "ext")


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """Exactly one of ``text``, ``token_ids`` and ``messages`` is set."""

    text: str | None = None
    token_ids: Sequence[Any] | None = None
    messages: Messages | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """Tell the form of ``prompt``. Raises ``ValueError`` saying what it may be."""
    if isinstance(prompt, str):
        return ParsedPrompt(text=prompt)
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
        if prompt and isinstance(prompt[0], Mapping):
            return ParsedPrompt(messages=check_messages(prompt))
        return ParsedPrompt(token_ids=prompt)
    raise ValueError(
        f"a prompt must be text, a list of token ids, a list of chat messages, or a dict with one of {', '.join(_FORMS)}; "
        f"got {type(prompt).__name__}"
    )


def _parse_mapping(prompt: Mapping[Any, Any]) -> ParsedPrompt:
    for key in prompt:
        if key not in _FORMS + _EXTRAS:
            hint = did_you_mean(str(key), _FORMS + _EXTRAS) or f"; known are {', '.join(_FORMS + _EXTRAS)}"
            raise ValueError(f"unknown key {key!r} in a prompt dict{hint}")
    forms = [k for k in _FORMS if prompt.get(k) is not None]
    if len(forms) != 1:
        raise ValueError(f"a prompt dict must have exactly one of {', '.join(_FORMS)}; got {forms or 'none'}")
    value, extras = prompt[forms[0]], {k: prompt[k] for k in _EXTRAS if prompt.get(k) is not None}
    if forms[0] == "prompt":
        if not isinstance(value, str):
            raise ValueError(f"prompt must be text, got {type(value).__name__}; token ids go under 'prompt_token_ids'")
        return ParsedPrompt(text=value, extras=extras)
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise ValueError(f"{forms[0]} must be a list, got {type(value).__name__}")
    if forms[0] == "messages":
        return ParsedPrompt(messages=check_messages(value), extras=extras)
    return ParsedPrompt(token_ids=value, extras=extras)


def check_messages(messages: Any) -> Messages:
    """A non-empty list of dicts with a ``role``, or ``ValueError`` naming the message that is not."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(f"messages must be a list of dicts like {{'role': 'user', 'content': 'Hi'}}, got {messages!r:.80}")
    if not messages:
        raise ValueError("messages is empty; give at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{i}] must be a dict with a text 'role', got {message!r:.80}")
    return messages
