"""Conversations as chat templates get them: checked, and made of plain values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.contracts.tokenizer import ChatTemplateError

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys that carry an assistant's reasoning; templates read one or another, so each message gets the first two."""


def prepare_messages(messages: Any, *, content_parts: bool) -> list[dict[str, Any]]:
    """Checked copies. ``content_parts``: the template handles content that is a list of parts; else text parts are joined
    with newlines. Raises ``ChatTemplateError`` naming the message and what is wrong with it.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ChatTemplateError(f"messages must be a list of {{'role': …, 'content': …}}, got {type(messages).__name__}")
    if not messages:
        raise ChatTemplateError("messages is empty; a conversation needs at least one message")
    return [_prepare(i, message, content_parts) for i, message in enumerate(messages)]


def _prepare(index: int, message: Any, content_parts: bool) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"{where} must be an object with role and content, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ChatTemplateError(f"{where} needs a role, a text such as 'user', got {role!r}")
    # A key that is null is left out, as many templates only ask whether it is there.
    found = {str(key): plain(value) for key, value in message.items() if value is not None}
    if "content" in found:
        found["content"] = _content(where, found["content"], content_parts)
    elif not message.get("tool_calls") and not any(message.get(key) for key in _REASONING):
        raise ChatTemplateError(f"{where} ({role}) has no content")
    reasoning = next((found[key] for key in _REASONING if key in found), None)
    if reasoning is not None:
        found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
    return found


def _content(where: str, content: Any, content_parts: bool) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatTemplateError(f"{where}.content must be a text or a list of parts, got {type(content).__name__}")
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ChatTemplateError(f"{where}.content[{i}] is of type {kind!r}; only {{'type': 'text', 'text': …}} is supported")
    return [{"type": "text", "text": text} for text in texts] if content_parts else "\n".join(texts)


def plain(value: Any) -> Any:
    """Rebuilt from None, bool, int, float, str, list and dict, so that a template meets no object with methods of its own.

    Pydantic models become dicts. Raises ``ChatTemplateError`` for anything else.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if callable(dump := getattr(value, "model_dump", None)):
        return plain(dump())
    raise ChatTemplateError(f"a {type(value).__name__} cannot be given to a chat template; use texts, numbers, lists and objects")
