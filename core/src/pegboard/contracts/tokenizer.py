"""Tokenizer: text to ids and back, and the chat template. Used in the front end only."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Final

API: Final = 1


class ChatTemplateError(ValueError):
    """No chat template, a broken one, or one that refused the messages; says how to give one."""


class NoChatTemplate(ChatTemplateError):
    """There is no chat template at all: text can be completed, conversations cannot be rendered."""


class Tokenizer(abc.ABC):
    """Constructed with ``source`` (a ``ModelSource``). Thread-safe after construction; imports no torch.

    Invariants: ``decode(encode(text, add_special_tokens=False))`` is ``text`` for the byte-level kinds; ids in
    ``range(vocab_size)``.
    """

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""

    @property
    @abc.abstractmethod
    def eos_token_id(self) -> int | None: ...

    @property
    @abc.abstractmethod
    def special_ids(self) -> frozenset[int]:
        """Ids that ``decode`` leaves out with ``skip_special_tokens``."""

    @abc.abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises ``ValueError`` for a text that it cannot take, such as one with half of a surrogate pair in it."""

    @abc.abstractmethod
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids without a token (padded vocabularies) decode to nothing. Bytes that are no UTF-8 give U+FFFD and leave the
        characters around them alone: more ids only add to a text, apart from up to three U+FFFD at its end that they may
        complete. Answers are decoded while they grow, and rely on that."""

    @abc.abstractmethod
    def token_text(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of one id; None if it has none."""

    @abc.abstractmethod
    def token_bytes(self, token_id: int) -> bytes | None:
        """What one id stands for inside a text, as UTF-8 bytes that may be part of a character; None for special ids and for
        ids without a token. Concatenated over ``encode(text, add_special_tokens=False)`` this is the text (or for vocabularies
        that cannot keep every text, what ``decode`` makes of it), but for a space that the tokenizer puts before it."""

    @abc.abstractmethod
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        """Render and encode a conversation. The template runs sandboxed. Raises ``ChatTemplateError``."""
