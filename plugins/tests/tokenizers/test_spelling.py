"""What single tokens stand for, in vocabularies spelled like those of well-known models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pegboard.contracts.model_source import ModelSource
from pegboard.testing.tiny_tokenizer import write_tokenizer
from pegboard_plugins.tokenizers.backend import BackendTokenizer, Parts
from pegboard_plugins.tokenizers.hf import HFTokenizer
from pegboard_plugins.tokenizers.spelling import _broken, byte_characters

LLAMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


def tokenizer(
    tokens: list[str],
    decoder: Any,
    *,
    merges: tuple[tuple[str, str], ...] = (),
    special: tuple[str, ...] = (),
    added: tuple[str, ...] = (),
) -> BackendTokenizer:
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges)))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return BackendTokenizer(Parts(backend, {}))


@pytest.mark.parametrize(
    ("decoder", "token", "expected"),
    [
        (decoders.ByteLevel(), "Ġthe", b" the"),
        (decoders.ByteLevel(), "ðŁĻ", b"\xf0\x9f\x99"),
        (decoders.ByteLevel(), "<0x41>", b"<0x41>"),
        (decoders.ByteLevel(), "two words", b"two words"),
        (LLAMA, "▁the", b" the"),
        (LLAMA, "▁", b" "),
        (LLAMA, "▁▁▁", b"   "),
        (LLAMA, "<0x0A>", b"\n"),
        (LLAMA, "<0xe2>", b"\xe2"),
        (LLAMA, "<0xE2>▁", b"<0xE2> "),
        (LLAMA, "Ġ", "Ġ".encode()),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]), "<0x0A>", b"<0x0A>"),
        (decoders.Metaspace(), "▁the▁", b" the "),
        (decoders.Metaspace("_"), "_the", b" the"),
        (decoders.WordPiece(), "the", b" the"),
        (decoders.WordPiece(), "##ing", b"ing"),
        (decoders.WordPiece(), ".", b"."),
        (decoders.WordPiece(cleanup=False), ".", b" ."),
        (decoders.BPEDecoder(), "the</w>", b"the "),
        (decoders.BPEDecoder(), "the", b"the"),
        (None, "the", b" the"),
    ],
)
def test_tokens_are_read_as_inside_a_text(decoder: Any, token: str, expected: bytes) -> None:
    assert tokenizer([token], decoder).token_bytes(0) == expected


def test_special_ids_and_ids_without_a_token_stand_for_nothing() -> None:
    found = tokenizer(["a"], LLAMA, special=("<s>",))
    assert [found.token_bytes(i) for i in (-1, 0, 1, 2, 2**32, 2**70)] == [None, b"a", None, None, None, None]


def test_added_tokens_are_text() -> None:
    """Also one that is written like bytes of a byte-level vocabulary, as DeepSeek's "ü"; but not a token that the model itself
    makes out of bytes and that is only listed as added, nor white space that SentencePiece marks, as Gemma's "▁▁"."""
    found = tokenizer(
        ["g", "Ã¼", "Ġ", "t", "Ġt"],
        decoders.ByteLevel(),
        merges=(("Ġ", "t"),),
        special=("<ö>",),
        added=("ü", "Ġt", "  ", "<a b>", "<think>"),
    )
    assert {found.token_text(i): found.token_bytes(i) for i in range(5, found.vocab_size)} == {
        "<ö>": None,
        "ü": "ü".encode(),
        "  ": b"  ",
        "<a b>": b"<a b>",
        "<think>": b"<think>",
    }
    assert [found.token_bytes(i) for i in range(5)] == [b"g", "ü".encode(), b" ", b"t", b" t"]
    ids = found.encode("gü<think>  <ö>")
    assert found.decode(ids) == "gü<think>  "
    assert found.decode(ids, skip_special_tokens=False) == "gü<think>  <ö>"
    assert found.decode([*ids, -1, 2**40]) == "gü<think>  "
    gemma = tokenizer(["a", "▁▁"], decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]), added=("▁▁", "<b>"))
    assert [gemma.token_bytes(i) for i in range(3)] == [b"a", b"  ", b"<b>"]


def test_a_broken_byte_leaves_the_characters_around_it_alone() -> None:
    tokens = ["<s>", "▁a", *(f"<0x{byte:02X}>" for byte in range(256)), "漢"]
    found = tokenizer(tokens, LLAMA, special=("<s>",))

    def ids(data: bytes) -> list[int]:
        return [2 + byte for byte in data]

    assert found.decode([1, *ids("é🙂".encode())]) == "aé🙂"
    assert found.decode([1, *ids("é🙂".encode()[:-1])]) == "aé\ufffd\ufffd\ufffd"
    assert found.decode([1, *ids(b"\nx\xff\n"), 258, *ids(b"\x80\xc3\xa9")]) == "a\nx\ufffd\n漢\ufffdé"
    assert found.decode([0, 1, *ids(b"\xc3"), 0, *ids(b"\xa9")]) == "aé"
    assert found.decode([1, *ids(b"\xc3"), 0, *ids(b"\xa9")], skip_special_tokens=False) == "a\ufffd<s>\ufffd"
    assert found.decode([1, *ids(b"\xc3"), 10**6, *ids(b"\xa9")]) == "aé"


@given(st.binary(max_size=12))
def test_broken_bytes_are_those_that_decoding_replaces(data: bytes) -> None:
    kept = bytearray(data)
    for i in reversed(list(_broken(data))):
        del kept[i]
    assert kept.decode() == data.decode(errors="ignore")


def test_the_byte_table_is_the_librarys() -> None:
    assert set(byte_characters()) == set(pre_tokenizers.ByteLevel.alphabet())
    decoder = decoders.ByteLevel()
    assert all(decoder.decode([character]) == chr(byte) for character, byte in byte_characters().items() if byte < 128)


@pytest.mark.parametrize("byte_fallback", [False, True])
def test_all_of_a_vocabulary_decodes_as_it_is_read(tmp_path: Path, byte_fallback: bool) -> None:
    write_tokenizer(tmp_path, byte_fallback=byte_fallback)
    found = HFTokenizer(ModelSource("m", str(tmp_path), "safetensors", "hf", {}))
    before = found.encode("x", add_special_tokens=False)
    for token_id in set(range(found.vocab_size)) - found.special_ids:
        data = found.token_bytes(token_id)
        assert data
        if data.decode(errors="ignore").encode() == data:
            assert found.decode([*before, token_id]) == "x" + data.decode()


def test_wordpiece_texts() -> None:
    words = ["[UNK]", "[SEP]", "hello", "world", "##ly", ",", ".", "don", "'", "t"]
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[UNK]", "[SEP]"])
    found = BackendTokenizer(Parts(backend, {}))
    for text in ("hello, worldly world.", "hello", ""):
        ids = found.encode(text, add_special_tokens=False)
        assert b"".join(found.token_bytes(i) or b"" for i in ids).decode() in (text, " " + text)
