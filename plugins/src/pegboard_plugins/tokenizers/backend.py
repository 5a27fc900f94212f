"""What all tokenizers here share: a ``tokenizers.Tokenizer``, ids put around a prompt, and chat templates."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pegboard.contracts.tokenizer import Tokenizer
from pegboard_plugins.tokenizers.chat_template import ChatTemplates
from pegboard_plugins.tokenizers.spelling import REPLACEMENT, Spelling

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


@dataclass(frozen=True, slots=True)
class Parts:
    """What a file format yields. ``prefix`` and ``suffix`` are put around a prompt beside what the backend itself adds."""

    backend: Backend
    special_tokens: Mapping[str, str]
    """``bos_token``, ``eos_token`` … to their texts: variables of chat templates."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()


class BackendTokenizer(Tokenizer):
    """Does not change its backend after construction, which makes it thread-safe: the backend encodes and decodes in parallel.

    ``decode`` never "cleans up" spaces: it gives back what was encoded. It differs from the library's in two things that would
    lose text: see ``Spelling.decode``.
    """

    def __init__(self, parts: Parts, chat_template: str | None = None) -> None:
        backend = parts.backend
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._prefix, self._suffix = list(parts.prefix), list(parts.suffix)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        eos = parts.special_tokens.get("eos_token")
        self._eos_token_id = None if eos is None else backend.token_to_id(eos)
        self.chat_templates = ChatTemplates(parts.chat_templates, parts.special_tokens, chat_template)

    @functools.cached_property
    def _vocab_size(self) -> int:
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_id(self) -> int | None:
        return self._eos_token_id

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            broken = next((i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
            if broken is None:
                raise
            raise ValueError(
                f"the text has {text[broken]!r} at place {broken}: half of a surrogate pair, which is no character; leave it out"
            ) from None
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        ids = list(token_ids)
        try:
            text = str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))
        except OverflowError:  # an id that is no unsigned 32-bit number has no token
            return self.decode([token_id for token_id in ids if 0 <= token_id < 2**32], skip_special_tokens)
        if (self._spelling.byte_fallback and REPLACEMENT in text) or not self._literal_ids.isdisjoint(ids):
            return self._decode_by_token(ids, skip_special_tokens)
        return text

    def _decode_by_token(self, ids: list[int], skip_special_tokens: bool) -> str:
        """What the backend's decoder would get wrong (see ``Spelling.decode``)."""
        left_out = self._special_ids if skip_special_tokens else frozenset[int]()
        tokens = (self.token_text(token_id) for token_id in ids if token_id not in left_out)
        return self._spelling.decode([token for token in tokens if token is not None])

    def token_text(self, token_id: int) -> str | None:
        found: str | None = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        return found

    def token_bytes(self, token_id: int) -> bytes | None:
        text = None if token_id in self._special_ids else self.token_text(token_id)
        return None if text is None else self._spelling.read(text)

    @functools.cached_property
    def _spelling(self) -> Spelling:
        return Spelling.of(self._backend)

    @functools.cached_property
    def _literal_ids(self) -> frozenset[int]:
        return frozenset(self._backend.token_to_id(token) for token in self._spelling.literal)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        text = self.chat_templates.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, chat_template=chat_template, **variables
        )
        return self.encode(text, add_special_tokens=False)
