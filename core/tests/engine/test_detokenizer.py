"""The incremental detokenizer against whole decoding, for byte-level and byte-fallback tokenizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from pegboard.contracts.tokenizer import Tokenizer
from pegboard.engine.detokenizer import REPLACEMENT, IncrementalDetokenizer
from pegboard.testing.tiny_tokenizer import SPECIAL_TOKENS, write_tokenizer

TEXTS = [
    "Hello, world. The capital of France is Paris.",
    "🙂👩‍👩‍👧 안녕하세요 नमस्ते e\u0301 \u200d 漢字, then ASCII",
    "  two leading spaces\n\n\ttabs",
    "a literal \ufffd stays",
    "é" * 200 + "🙂" * 100,
]


class Counting(Tokenizer):
    """A ``tokenizers`` tokenizer behind the contract, that counts the ids it decodes."""

    def __init__(self, raw: RawTokenizer, special: frozenset[int] = frozenset()) -> None:
        self.raw, self._special, self.decoded_ids, self.longest = raw, special, 0, 0

    vocab_size = property(lambda self: self.raw.get_vocab_size())  # type: ignore[assignment]
    eos_token_id = 0  # type: ignore[assignment]
    special_ids = property(lambda self: self._special)  # type: ignore[assignment]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.raw.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.decoded_ids += len(token_ids)
        self.longest = max(self.longest, len(token_ids))
        return self.raw.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str | None:
        return self.raw.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes | None:
        raise AssertionError

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> list[int]:
        raise AssertionError


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Counting:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Counting(RawTokenizer.from_file(str(folder / "tokenizer.json")), frozenset(range(len(SPECIAL_TOKENS))))


@pytest.fixture(scope="module")
def byte_fallback() -> Counting:
    """Sentence pieces with a stripped leading space, and a token for each byte."""
    pieces = ["<unk>", "▁", "▁Hello", "▁the", "▁Paris", "a", "b", ".", ",", "▁漢", "字"]
    vocab = {p: i for i, p in enumerate(pieces + [f"<0x{b:02X}>" for b in range(256)])}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(steps)
    return Counting(raw)


def pieces(tokenizer: Tokenizer, ids: Sequence[int], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    return [detokenizer.push(i) for i in ids] + [detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_out_whole_and_without_replacement_characters(byte_level: Counting, text: str) -> None:
    ids = byte_level.encode(text, add_special_tokens=False)
    parts = pieces(byte_level, ids)
    assert "".join(parts) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in p for p in parts)
        assert parts[-1] == "", "text was held back although it was certain"


@pytest.mark.parametrize("text", ["Hello", "🙂"])
def test_every_byte_a_token(byte_level: Counting, text: str) -> None:
    """Characters that span up to four tokens appear with their last one."""
    by_byte = [byte_level.raw.token_to_id(c) for c in _spelled(text.encode())]
    parts = pieces(byte_level, by_byte)
    assert "".join(parts) == text
    assert all(REPLACEMENT not in p for p in parts)


def test_a_character_cut_at_the_end_shows_as_whole_decoding_shows_it(byte_level: Counting) -> None:
    ids = [byte_level.raw.token_to_id(c) for c in _spelled("ok🙂".encode()[:-1])]
    parts = pieces(byte_level, ids)
    assert "".join(parts[:-1]) == "ok"
    assert parts[-1] == byte_level.decode(ids)[2:] == REPLACEMENT


def test_special_tokens_are_left_out_or_kept(byte_level: Counting) -> None:
    ids = [2, *byte_level.encode("Hi", add_special_tokens=False), 3]
    assert "".join(pieces(byte_level, ids)) == "Hi"
    assert "".join(pieces(byte_level, ids, skip=False)) == "<|im_start|>Hi<|im_end|>"


@given(st.lists(st.integers(0, 999), max_size=80))
@settings(max_examples=300, deadline=None)
def test_any_ids_join_to_their_decoding(byte_level: Counting, ids: list[int]) -> None:
    assert "".join(pieces(byte_level, ids)) == byte_level.decode(ids)
    assert "".join(pieces(byte_level, ids, skip=False)) == byte_level.decode(ids, skip_special_tokens=False)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_join_to_their_decoding(byte_level: Counting, data: bytes) -> None:
    ids = [byte_level.raw.token_to_id(c) for c in _spelled(data)]
    assert "".join(pieces(byte_level, ids)) == byte_level.decode(ids)


@given(st.text(st.sampled_from("ab .,漢字é🙂안नम\u200d"), max_size=120))
@settings(max_examples=200, deadline=None)
def test_byte_fallback_text_comes_out_whole(byte_fallback: Counting, text: str) -> None:
    ids = byte_fallback.encode(text.replace(" ", "▁"))
    parts = pieces(byte_fallback, ids)
    assert "".join(parts) == byte_fallback.decode(ids)
    assert not any(REPLACEMENT in p for p in parts)


def test_a_leading_space_is_as_whole_decoding_has_it(byte_fallback: Counting) -> None:
    ids = [byte_fallback.raw.token_to_id(p) for p in ["▁Hello", "▁the", "▁Paris", "."]]
    assert pieces(byte_fallback, ids) == ["Hello", " the", " Paris", ".", ""]


@pytest.mark.parametrize("text", ["word " * 2000, "🙂" * 1000, "漢字" * 1000])
def test_cost_per_token_does_not_depend_on_length(byte_level: Counting, text: str) -> None:
    ids = byte_level.encode(text, add_special_tokens=False)
    byte_level.decoded_ids, byte_level.longest = 0, 0
    pieces(byte_level, ids)
    assert byte_level.decoded_ids < 14 * len(ids)
    assert byte_level.longest <= 16


def test_cost_is_bounded_for_output_that_is_no_text(byte_level: Counting) -> None:
    ids = [byte_level.raw.token_to_id(c) for c in _spelled(b"\xe2\x82\xff\xf0" * 500)]
    byte_level.longest = 0
    pieces(byte_level, ids)
    assert byte_level.longest <= 64


def _spelled(data: bytes) -> list[str]:
    """Byte-level BPE's characters for raw bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {b: chr(b) for b in plain}
    table |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in table)}
    return [table[b] for b in data]
