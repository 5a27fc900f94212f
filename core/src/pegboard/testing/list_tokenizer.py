"""ListTokenizer: a tokenizer that is a list of what its ids stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.contracts.tokenizer import NoChatTemplate, Tokenizer


class ListTokenizer(Tokenizer):
    """``tokens``: the bytes of each id, None for a special one. Encodes by taking the longest token that fits, so that every text
    can be encoded when all single bytes are there."""

    def __init__(self, tokens: Sequence[bytes | None], eos_token_id: int | None = None) -> None:
        self._tokens, self._eos = list(tokens), eos_token_id
        self._ids = {token: token_id for token_id, token in reversed(list(enumerate(tokens))) if token}
        self._longest = max(map(len, self._ids), default=0)

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    @property
    def eos_token_id(self) -> int | None:
        return self._eos

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(token_id for token_id, token in enumerate(self._tokens) if token is None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises ``ValueError`` for a text that the tokens cannot spell."""
        data, ids, place = text.encode(), [], 0
        while place < len(data):
            for length in range(min(self._longest, len(data) - place), 0, -1):
                token_id = self._ids.get(data[place : place + length])
                if token_id is not None:
                    break
            else:
                raise ValueError(f"no token spells {data[place:]!r:.40}")
            ids.append(token_id)
            place += length
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        def spelled(token_id: int) -> bytes:
            if not 0 <= token_id < len(self._tokens):
                return b""
            token = self._tokens[token_id]
            return (b"" if skip_special_tokens else b"<%d>" % token_id) if token is None else token

        return b"".join(map(spelled, token_ids)).decode(errors="replace")

    def token_text(self, token_id: int) -> str | None:
        return self.decode([token_id], skip_special_tokens=False) if 0 <= token_id < len(self._tokens) else None

    def token_bytes(self, token_id: int) -> bytes | None:
        return self._tokens[token_id] if 0 <= token_id < len(self._tokens) else None

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> list[int]:
        raise NoChatTemplate("a list of tokens has no chat template")
