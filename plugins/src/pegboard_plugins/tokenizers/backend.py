"""What all tokenizers here share: a ``tokenizers.Tokenizer``, ids put around a prompt, and chat templates."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pegboard.contracts.tokenizer import Tokenizer
from pegboard_plugins.tokenizers.chat_template import ChatTemplates
from pegboard_plugins.tokenizers.spelling import Spelling

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

    ``decode`` never "cleans up" spaces: it gives back what was encoded.
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
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        try:
            return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
        except OverflowError:  # an id that is no unsigned 32-bit number has no token
            return str(self._backend.decode(list(_possible(token_ids)), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str | None:
        found: str | None = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        return found

    def token_bytes(self, token_id: int) -> bytes | None:
        text = None if token_id in self._special_ids else self.token_text(token_id)
        return None if text is None else self._spelling.read(text)

    @functools.cached_property
    def _spelling(self) -> Spelling:
        return Spelling.of(self._backend)

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


def _possible(token_ids: Iterable[int]) -> Iterable[int]:
    return (token_id for token_id in token_ids if 0 <= token_id < 2**32)
