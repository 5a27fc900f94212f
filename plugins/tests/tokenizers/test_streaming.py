"""Every kind of decoder behind a BackendTokenizer: texts decoded while they grow, and bytes of tokens, for any ids."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pegboard.testing.text_stream import check_stream, stream
from pegboard_plugins.tokenizers.backend import BackendTokenizer, Parts
from pegboard_plugins.tokenizers.spelling import REPLACEMENT, byte_characters

SPECIAL = ("<s>", "</s>", "[▁SEP]", "<é>")
ADDED = ("<think>", "üx", "漢", "  ", "<a b>")
PIECES = (
    "",
    "▁",
    "▁▁",
    "▁the",
    "##ing",
    "the",
    "a",
    "b",
    ".",
    ",",
    "n't",
    "漢",
    "🙂",
    "字▁",
    "\ufffd",
    "</w>",
    "a</w>",
    " ",
    " b",
    "#",
)
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
STRIP = decoders.Strip(" ", 1, 0)


def make(model: Any, decoder: Any) -> BackendTokenizer:
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False) if isinstance(decoder, decoders.ByteLevel) else None
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    return BackendTokenizer(Parts(backend, {}))


def byte_level() -> BackendTokenizer:
    """Tokens of single bytes, and some that begin and end inside characters."""
    spell = {byte: character for character, byte in byte_characters().items()}
    several = ["🙂", " the", "é", "字 "]
    data = [bytes([byte]) for byte in range(256)] + [text.encode() for text in several]
    data += [b"\xf0\x9f", b"\x99\x82\xf0", b"\x82a\xe2", b"\x82\xac", b"a\xc3", b"\x80\x80"]
    tokens = ["", *("".join(spell[byte] for byte in item) for item in data), "plain text 漢"]
    return make(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]), decoders.ByteLevel())


def bpe(*steps: Any) -> BackendTokenizer:
    vocab = {piece: i for i, piece in enumerate((*PIECES, *BYTES))}
    return make(models.BPE(vocab=vocab, merges=[], byte_fallback=True), decoders.Sequence(list(steps)))


def unigram(decoder: Any) -> BackendTokenizer:
    return make(models.Unigram([(piece, -1.0) for piece in (*PIECES, *BYTES)], unk_id=0, byte_fallback=True), decoder)


def words(decoder: Any) -> BackendTokenizer:
    return make(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="a"), decoder)


REPLACE = decoders.Replace("▁", " ")
KINDS: dict[str, Callable[[], BackendTokenizer]] = {
    "byte-level": byte_level,
    "llama": lambda: bpe(REPLACE, decoders.ByteFallback(), decoders.Fuse(), STRIP),
    "gemma": lambda: bpe(REPLACE, decoders.ByteFallback(), decoders.Fuse()),
    "unigram": lambda: unigram(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "metaspace": lambda: unigram(decoders.Metaspace()),
    "metaspace without prefix": lambda: unigram(decoders.Metaspace(prepend_scheme="never")),
    "wordpiece": lambda: words(decoders.WordPiece()),
    "wordpiece without cleanup": lambda: words(decoders.WordPiece(cleanup=False)),
    "suffixes": lambda: words(decoders.BPEDecoder()),
    "no decoder": lambda: words(None),
}


@functools.cache
def of_kind(kind: str) -> BackendTokenizer:
    return KINDS[kind]()


@st.composite
def some_ids(draw: st.DrawFn, tokenizer: BackendTokenizer) -> list[int]:
    """Runs of ids, each run of ids alike: anything, single bytes, tokens without text, added tokens."""
    size = tokenizer.vocab_size
    anything = st.integers(-1, size + 1)
    single = [i for i in range(size) if len(tokenizer.token_bytes(i) or b"") == 1] or [0]
    broken = [i for i in single if (tokenizer.token_bytes(i) or b"") in (b"\xf0", b"\x9f", b"\x99", b"\x82", b"\xc3", b"a")] or [
        0
    ]
    choices = [anything, st.sampled_from(single), st.sampled_from(broken), st.sampled_from([0, size, -1, 2**40])]
    choices.append(st.integers(size - len(SPECIAL) - len(ADDED), size - 1))
    runs = draw(st.lists(st.sampled_from(choices).flatmap(lambda ids: st.lists(ids, max_size=30)), max_size=5))
    return [token_id for run in runs for token_id in run]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=80, deadline=None)
def test_any_ids_are_decoded_while_they_grow(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = of_kind(kind)
    check_stream(tokenizer, data.draw(some_ids(tokenizer)), skip)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=50, deadline=None)
def test_closing_up_takes_only_spaces_between_special_tokens(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = of_kind(kind)
    ids = data.draw(some_ids(tokenizer))
    spaced, closed = stream(tokenizer, ids, skip), stream(tokenizer, ids, skip, False)
    shown = [i for i, token_id in enumerate(ids) if tokenizer.decode([token_id], False)]
    for i, (before, after) in enumerate(zip(spaced, closed, strict=True)):
        adjacent = i in shown and shown.index(i) > 0 and {ids[i], ids[shown[shown.index(i) - 1]]} <= tokenizer.special_ids
        assert before == after or (adjacent and not skip and before == " " + after == f" {tokenizer.token_text(ids[i])}")


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_bytes_of_tokens_join_to_their_decoding(kind: str, data: st.DataObject) -> None:
    """After a first token: what a text starts with, decoders treat in their own ways."""
    tokenizer = of_kind(kind)
    first = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) in (b"a", b" a"))
    ids = [first, *(i for i in data.draw(some_ids(tokenizer)) if tokenizer.token_text(i) != "")]
    joined = b"".join(tokenizer.token_bytes(token_id) or b"" for token_id in ids)
    each = "surrogateescape" if tokenizer._spelling.byte_fallback else "replace"
    text = "".join(REPLACEMENT if "\udc80" <= c <= "\udcff" else c for c in joined.decode(errors=each)).removeprefix(" ")
    decoded = tokenizer.decode(ids)
    assert decoded == text or (kind == "suffixes" and decoded + " " == text)  # no space after the last word
