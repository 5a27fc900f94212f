"""How a vocabulary spells bytes: byte-level characters, or text with a mark for spaces and ``<0x0A>`` for single bytes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_BYTE: Final = re.compile("<0x([0-9A-Fa-f]{2})>")


def byte_characters() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table): printable Latin-1 characters stand for
    themselves, the others for the characters from U+0100 on, in order."""
    itself = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(256 + i): byte for i, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class Spelling:
    """``byte_level``: every character of a token stands for one byte. Otherwise ``space`` (if any) stands for a space, and with
    ``byte_fallback`` a token ``<0xE2>`` for that byte. ``added``: tokens that are spelled as they are."""

    byte_level: bool
    space: str
    byte_fallback: bool
    added: frozenset[str]

    @classmethod
    def of(cls, backend: Backend) -> Spelling:
        """From the tokenizer's own decoder, which is what turns its tokens into text."""
        decoder = getattr(backend, "decoder", None)
        steps = list(_steps(json.loads(decoder.__getstate__()))) if decoder is not None else []
        kinds = {step["type"] for step in steps}
        marks = [step.get("replacement", "\u2581") for step in steps if step["type"] == "Metaspace"]
        marks += [step["pattern"]["String"] for step in steps if step["type"] == "Replace" and step.get("content") == " "]
        added = frozenset(token.content for token in backend.get_added_tokens_decoder().values())
        return cls("ByteLevel" in kinds, next(iter(marks), ""), "ByteFallback" in kinds, added)

    def read(self, token: str) -> bytes:
        """The bytes that ``token`` stands for inside a text."""
        if token in self.added:
            return token.encode()
        if self.byte_level and all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        single = _BYTE.fullmatch(token) if self.byte_fallback else None
        if single is not None:
            return bytes([int(single[1], 16)])
        return (token.replace(self.space, " ") if self.space else token).encode()


_BYTES: Final = byte_characters()


def _steps(decoder: Any) -> list[Any]:
    """The decoder's steps, those of sequences one by one."""
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _steps(inner)]
