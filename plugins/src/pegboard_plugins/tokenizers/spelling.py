"""How a vocabulary spells bytes: byte-level characters, or text with a mark for spaces and ``<0x0A>`` for single bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

REPLACEMENT: Final = "\ufffd"
_BYTE: Final = re.compile("<0x([0-9A-Fa-f]{2})>")
NEIGHBOUR: Final = "a"
"""A token that is text as it is to every decoder."""


def byte_characters() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table): printable Latin-1 characters stand for
    themselves, the others for the characters from U+0100 on, in order."""
    itself = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES: Final = byte_characters()
_CHARACTERS: Final = {byte: character for character, byte in _BYTES.items()}


@dataclass(frozen=True, slots=True)
class Spelling:
    """``byte_level``: every character of a token stands for one byte. Otherwise the decoder says what a token stands for, and
    with ``byte_fallback`` a token ``<0xE2>`` stands for that byte.

    ``literal``: added tokens of a byte-level vocabulary that are text, although all their characters could stand for bytes
    ("ü" in DeepSeek's). ``join``: the tokenizer's own way from tokens to text. ``before`` and ``after``: what it makes of
    ``NEIGHBOUR`` at the start and at the end of a text.
    """

    byte_level: bool
    byte_fallback: bool
    literal: frozenset[str]
    join: Callable[[list[str]], str]
    before: str
    after: str

    @classmethod
    def of(cls, backend: Backend) -> Spelling:
        """From the tokenizer's own decoder, which is what turns its tokens into text."""
        decoder = backend.decoder
        kinds = set() if decoder is None else {step["type"] for step in _steps(json.loads(decoder.__getstate__()))}
        byte_level = "ByteLevel" in kinds
        join = " ".join if decoder is None else decoder.decode
        before = join([NEIGHBOUR])
        return cls(
            byte_level=byte_level,
            byte_fallback="ByteFallback" in kinds and not byte_level,
            literal=frozenset(_literal(backend)) if byte_level else frozenset(),
            join=join,
            before=before,
            after=join([NEIGHBOUR, NEIGHBOUR]).removeprefix(before),
        )

    def read(self, token: str) -> bytes:
        """The bytes that ``token`` stands for inside a text."""
        if self.byte_level:
            return token.encode() if token in self.literal else _read_byte_level(token)
        byte = self._byte(token)
        return self._between(token) if byte is None else bytes([byte])

    def decode(self, tokens: Sequence[str]) -> str:
        """The text of ``tokens``: what ``join`` makes of them, but literal tokens are text, and of a run of byte tokens only
        those that are no UTF-8 become U+FFFD, one each, as SentencePiece does it. (The ``ByteFallback`` decoder takes the
        whole run: one broken byte and all characters before it are gone, also those that a stream has shown already.)
        """
        if self.literal:
            return self.join([_spelled(token) if token in self.literal else token for token in tokens])
        respelled = list(tokens)
        for start, run in self._byte_runs(tokens):
            for i in _broken(run):
                respelled[start + i] = REPLACEMENT
        return self.join(respelled)

    def _byte(self, token: str) -> int | None:
        found = _BYTE.fullmatch(token) if self.byte_fallback else None
        return None if found is None else int(found[1], 16)

    def _byte_runs(self, tokens: Sequence[str]) -> Iterator[tuple[int, bytes]]:
        """Where each run of byte tokens starts, and its bytes."""
        run = bytearray()
        for i, token in enumerate(tokens):
            byte = self._byte(token)
            if byte is not None:
                run.append(byte)
            elif run:
                yield i - len(run), bytes(run)
                run.clear()
        if run:
            yield len(tokens) - len(run), bytes(run)

    def _between(self, token: str) -> bytes:
        """What ``token`` adds between two others: decoders treat the first and the last token of a text in their own ways."""
        return self.join([NEIGHBOUR, token, NEIGHBOUR]).removeprefix(self.before).removesuffix(self.after).encode()


def _read_byte_level(token: str) -> bytes:
    """As the ``ByteLevel`` decoder: a token with any other character in it is text."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()


def _spelled(text: str) -> str:
    """``text`` in the characters that stand for its bytes."""
    return "".join(_CHARACTERS[byte] for byte in text.encode())


def _literal(backend: Backend) -> Iterator[str]:
    """Added tokens that the ``ByteLevel`` decoder would take for bytes although the model does not make them out of bytes."""
    for added in backend.get_added_tokens_decoder().values():
        token: str = added.content
        if _read_byte_level(token) != token.encode() and [piece.value for piece in backend.model.tokenize(token)] != [token]:
            yield token


def _broken(data: bytes) -> Iterator[int]:
    """Indices of the bytes that belong to no complete UTF-8 character."""
    i = 0
    for character in data.decode(errors="surrogateescape"):  # which makes a lone surrogate of each such byte
        broken = "\ud800" <= character <= "\udfff"
        if broken:
            yield i
        i += 1 if broken else len(character.encode())


def _steps(decoder: Any) -> list[Any]:
    """The decoder's steps, those of sequences one by one."""
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _steps(inner)]
