"""The incremental detokenizer against whole decoding, for byte-level and byte-fallback tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RawTokenizer

from pegboard.contracts.tokenizer import Tokenizer
from pegboard.engine.detokenizer import REPLACEMENT
from pegboard.testing.text_stream import check_stream, stream
from pegboard.testing.tiny_tokenizer import write_tokenizer

TEXTS = [
    "Hello, world. The capital of France is Paris.",
    "🙂👩‍👩‍👧 안녕하세요 नमस्ते e\u0301 \u200d 漢字, then ASCII",
    "  two leading spaces\n\n\ttabs",
    "a literal \ufffd stays",
    "é" * 200 + "🙂" * 100,
    "x",
    "",
]
LONG = 20_000
"""Tokens of an output whose cost is counted."""
NO_TOKEN = 10**6


class Counting(Tokenizer):
    """A ``tokenizers`` tokenizer behind the contract, that counts the ids it decodes."""

    def __init__(self, raw: RawTokenizer) -> None:
        self.raw, self.decoded_ids, self.longest = raw, 0, 0
        self._special = frozenset(i for i, token in raw.get_added_tokens_decoder().items() if token.special)

    vocab_size = property(lambda self: self.raw.get_vocab_size())  # type: ignore[assignment]
    eos_token_id = 0  # type: ignore[assignment]
    special_ids = property(lambda self: self._special)  # type: ignore[assignment]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self.raw.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.decoded_ids += len(token_ids)
        self.longest = max(self.longest, len(token_ids))
        return self.raw.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str | None:
        return self.raw.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes | None:
        text = self.token_text(token_id)
        return None if text is None or token_id in self._special else text.encode()

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> list[int]:
        raise AssertionError

    def ids(self, tokens: Iterable[str]) -> list[int]:
        found = [self.raw.token_to_id(token) for token in tokens]
        assert None not in found
        return found


class Fallback(Counting):
    """With what the contract asks of broken bytes: each is a U+FFFD, and the characters around them stay."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        super().decode(token_ids)
        out = bytearray()
        for token_id in token_ids:
            token = self.token_text(token_id) or ""
            if token_id not in self._special:
                out += bytes([int(token[3:5], 16)]) if token.startswith("<0x") else token.replace("▁", " ").encode()
            elif not skip_special_tokens:
                out += token.encode()
        text = out.decode(errors="surrogateescape").removeprefix(" ")
        return "".join(REPLACEMENT if "\udc80" <= c <= "\udcff" else c for c in text)


Load = Callable[[type[Counting], bool], Counting]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    def load(kind: type[Counting], byte_fallback: bool) -> Counting:
        folder: Path = tmp_path_factory.mktemp("tokenizer")
        write_tokenizer(folder, byte_fallback=byte_fallback)
        raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
        raw.add_tokens([AddedToken("<think>", special=False), AddedToken("漢x", special=False)])
        return kind(raw)

    return load


@pytest.fixture(scope="module")
def byte_level(load: Load) -> Counting:
    return load(Counting, False)


@pytest.fixture(scope="module")
def byte_fallback(load: Load) -> Counting:
    return load(Fallback, True)


@pytest.fixture(scope="module")
def library(load: Load) -> Counting:
    """Byte fallback as the ``tokenizers`` library itself decodes it."""
    return load(Counting, True)


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback", "library"])
def any_kind(request: pytest.FixtureRequest) -> Counting:
    found: Counting = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_out_whole_and_without_replacement_characters(any_kind: Counting, text: str) -> None:
    pieces = check_stream(any_kind, any_kind.encode(text))
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)
        assert pieces[-1] == "", "text was held back although it was certain"


@pytest.mark.parametrize("text", TEXTS)
def test_every_byte_a_token(byte_level: Counting, byte_fallback: Counting, text: str) -> None:
    """Characters that span up to four tokens appear with their last one."""
    for tokenizer, spelled in ((byte_level, _spelled), (byte_fallback, _fallback)):
        pieces = check_stream(tokenizer, tokenizer.ids(spelled(text.encode())))
        assert "".join(pieces) == (text.removeprefix(" ") if tokenizer is byte_fallback else text)
        assert REPLACEMENT in text or all(REPLACEMENT not in piece for piece in pieces)


@pytest.mark.parametrize(("kind", "shown"), [("level", "\ufffd"), ("fallback", "\ufffd" * 3)])
def test_a_character_cut_at_the_end_shows_as_whole_decoding_shows_it(
    byte_level: Counting, byte_fallback: Counting, kind: str, shown: str
) -> None:
    tokenizer, spelled = (byte_level, _spelled) if kind == "level" else (byte_fallback, _fallback)
    pieces = stream(tokenizer, tokenizer.ids(spelled("ok🙂".encode()[:-1])))
    assert "".join(pieces[:-1]) == "ok"
    assert pieces[-1] == shown


def test_special_tokens_are_left_out_or_kept(any_kind: Counting) -> None:
    ids = [2, *any_kind.encode("Hi"), 3]
    assert "".join(stream(any_kind, ids)) == "Hi"
    assert "".join(stream(any_kind, ids, False)) == any_kind.decode(ids, skip_special_tokens=False)
    assert stream(any_kind, ids, False)[0] == "<|im_start|>"


IDS = st.lists(st.one_of(st.integers(0, 1001), st.integers(4, 259), st.just(NO_TOKEN)), max_size=60)


@given(IDS, st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_ids_join_to_their_decoding(byte_level: Counting, byte_fallback: Counting, ids: list[int], skip: bool) -> None:
    for tokenizer in (byte_level, byte_fallback):
        check_stream(tokenizer, ids, skip)


@given(st.binary(max_size=80))
@settings(max_examples=300, deadline=None)
def test_any_bytes_join_to_their_decoding(byte_level: Counting, byte_fallback: Counting, data: bytes) -> None:
    check_stream(byte_level, byte_level.ids(_spelled(data)))
    check_stream(byte_fallback, byte_fallback.ids(_fallback(data)))


BITS = [bytes([b]) for b in b"\xf0\x9f\x99\x82\xe2\x80\xc3\xa9a"] + ["🙂".encode(), "é".encode(), b"a b"]


@given(st.lists(st.sampled_from(BITS), max_size=60).map(b"".join))
@settings(max_examples=300, deadline=None)
def test_broken_and_whole_characters_mixed(byte_level: Counting, byte_fallback: Counting, data: bytes) -> None:
    check_stream(byte_level, byte_level.ids(_spelled(data)))
    check_stream(byte_fallback, byte_fallback.ids(_fallback(data)))


@given(st.text(st.sampled_from("ab .,漢字é🙂안नम\u200d"), max_size=60))
@settings(max_examples=200, deadline=None)
def test_whole_characters_come_out_whole(any_kind: Counting, text: str) -> None:
    pieces = check_stream(any_kind, any_kind.encode(text))
    assert not any(REPLACEMENT in piece for piece in pieces)


@given(st.binary(min_size=1, max_size=80))
@settings(max_examples=200, deadline=None)
def test_a_decoder_that_takes_back_characters_is_borne(library: Counting, data: bytes) -> None:
    """That of the library makes a whole run of bytes U+FFFD if one is broken. Text before and after the run comes out whole."""
    text = "".join(stream(library, library.ids(["▁the", *_fallback(data), "▁of", "▁Paris", "."])))
    assert text.startswith("the")
    assert text.endswith(" of Paris.")


def test_a_leading_space_is_as_whole_decoding_has_it(byte_fallback: Counting) -> None:
    ids = byte_fallback.ids(["▁capital", "▁the", "▁Paris", "."])
    assert stream(byte_fallback, ids) == ["capital", " the", " Paris", ".", ""]
    assert stream(byte_fallback, [0, NO_TOKEN, *ids]) == ["", "", "capital", " the", " Paris", ".", ""]
    assert "".join(stream(byte_fallback, [*ids[:1], *[NO_TOKEN] * 100, *ids[1:]])) == "capital the Paris."


def words(decoder: Any, *tokens: str) -> Counting:
    """A tokenizer of whole tokens; those in brackets are special."""
    raw = RawTokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    raw.add_special_tokens([token for token in tokens if token.startswith("[")])
    if decoder is not None:
        raw.decoder = decoder
    return Counting(raw)


@pytest.mark.parametrize(
    ("decoder", "spaced", "closed"),
    [
        (decoders.WordPiece(), "[A] [B] ab [A] [B] [B].", "[A][B] ab [A][B][B]."),
        (None, "[A] [B] a ##b [A] [B] [B] .", "[A][B] a ##b [A][B][B] ."),
        (decoders.Metaspace(), "[A][B]a##b[A][B][B].", "[A][B]a##b[A][B][B]."),
        (decoders.ByteLevel(), "[A][B]a##b[A][B][B].", "[A][B]a##b[A][B][B]."),
    ],
)
def test_special_tokens_can_be_closed_up(decoder: Any, spaced: str, closed: str) -> None:
    tokenizer = words(decoder, "[A]", "[B]", "a", "##b", ".")
    ids = [0, 1, 2, 3, 0, NO_TOKEN, 1, 1, 4]
    assert "".join(stream(tokenizer, ids, False)) == spaced == tokenizer.decode(ids, False)
    assert "".join(stream(tokenizer, ids, False, False)) == closed
    assert stream(tokenizer, ids, True, False) == stream(tokenizer, ids)


def test_a_special_tokens_own_space_is_its_text() -> None:
    tokenizer = words(decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]), "[A]", "[▁B]", "▁a")
    tokenizer.raw.add_special_tokens(["▁<PRE>"])
    tokenizer = Counting(tokenizer.raw)
    ids = [0, 3, 3, 1, 2]
    assert "".join(stream(tokenizer, ids, False, False)) == "[A] <PRE> <PRE>[ B] a"


COSTLY: dict[str, Callable[[Counting], list[int]]] = {
    "words": lambda t: t.encode("the word of it " * 5000),
    "characters of several tokens": lambda t: t.encode("🙂漢字é" * 2000),
    "single bytes that are no text": lambda t: [_byte(t, 0x80)],
    "characters that never end": lambda t: [_byte(t, byte) for byte in b"\xf0\x9f\x99"],
    "broken and whole characters": lambda t: [_byte(t, byte) for byte in b"\xe2\x82\xff\xf0\x9f\x99\x82a\x80"],
    "special tokens": lambda t: [2, 3],
    "added tokens": lambda t: t.ids(["<think>", "漢x"]),
    "nothing": lambda t: [NO_TOKEN],
    "hardly anything": lambda t: [NO_TOKEN] * 50 + t.encode("a"),
    "nothing inside a character": lambda t: [_byte(t, 0xF0), *[NO_TOKEN] * 100, _byte(t, 0x9F)],
}


@pytest.mark.parametrize(("name", "skip"), [*((name, False) for name in COSTLY), ("special tokens", True)])
def test_cost_per_token_does_not_depend_on_length(byte_level: Counting, byte_fallback: Counting, name: str, skip: bool) -> None:
    for tokenizer in (byte_level, byte_fallback):
        some = COSTLY[name](tokenizer)
        ids = (some * (LONG // len(some) + 1))[:LONG]
        tokenizer.decoded_ids, tokenizer.longest = 0, 0
        pieces = stream(tokenizer, ids, skip)
        assert tokenizer.decoded_ids < 18 * LONG
        assert tokenizer.longest <= 24
        assert "".join(pieces) == tokenizer.decode(ids, skip)


def test_tokens_that_cut_characters_anywhere_cost_no_more() -> None:
    """No token begins where a character does."""
    raw = RawTokenizer(
        models.BPE(vocab={"".join(_spelled(b"\xf0\x9f")): 0, "".join(_spelled(b"\x99\x82\xf0\x9f")): 1}, merges=[])
    )
    raw.decoder = decoders.ByteLevel()
    tokenizer = Counting(raw)
    pieces = stream(tokenizer, [0, *[1] * LONG])
    assert pieces == ["", *["🙂"] * LONG, REPLACEMENT]
    assert tokenizer.longest <= 12
    assert tokenizer.decoded_ids < 10 * LONG


LLAMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


@pytest.mark.parametrize("decoder", [LLAMA, decoders.Metaspace(), decoders.WordPiece(), decoders.ByteLevel(), None])
@pytest.mark.parametrize("front", [[], ["▁"], ["▁a"], ["<0xF0>"], ["▁a", "<0xC3>"]])
def test_tokens_without_text_cost_nothing_and_change_nothing(decoder: Any, front: list[str]) -> None:
    tokenizer = words(decoder, "", "▁", "▁a", "b", "<0xF0>", "<0xC3>", "<0xA9>")
    for absent in ([], [NO_TOKEN]):
        for rest in (["▁a", "b"], ["<0xA9>", "▁", "▁a"], ["▁", "", "b"]):
            ids = absent + tokenizer.ids(front) + absent + tokenizer.ids([""] * 1000) + absent + tokenizer.ids(rest)
            tokenizer.longest = 0
            pieces = stream(tokenizer, ids)
            assert tokenizer.longest <= 12
            assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize("count", range(10, 50))
def test_text_after_bytes_that_are_none(byte_level: Counting, byte_fallback: Counting, library: Counting, count: int) -> None:
    """However many they are, the characters that follow come out whole."""
    data = b"\xff" * count + "🙂é".encode() * 6
    for tokenizer, spelled in ((byte_level, _spelled), (byte_fallback, _fallback)):
        check_stream(tokenizer, tokenizer.ids(spelled(data)))
    assert "".join(stream(library, library.ids([*_fallback(data), "▁the", "▁of"]))).endswith(" the of")


def _byte(tokenizer: Counting, byte: int) -> int:
    (found,) = tokenizer.ids(_fallback(bytes([byte])) if isinstance(tokenizer, Fallback) else _spelled(bytes([byte])))
    return found


def _fallback(data: bytes) -> list[str]:
    """Tokens of single bytes, as vocabularies with byte fallback have them."""
    return [f"<0x{byte:02X}>" for byte in data]


def _spelled(data: bytes) -> list[str]:
    """Byte-level BPE's characters for raw bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {b: chr(b) for b in plain}
    table |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in table)}
    return [table[b] for b in data]
