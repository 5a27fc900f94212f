"""Tokenizers made from GGUF metadata: kinds, defaults and defects."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard.config import EngineConfig
from pegboard.contracts.model_source import ModelNotFound, ModelSource
from pegboard.contracts.tokenizer import ChatTemplateError
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.gguf_files import write_gguf
from pegboard_plugins.tokenizers.gguf import GGUFTokenizer
from pegboard_plugins.tokenizers.gguf_pre import PRE_TOKENIZERS
from pegboard_plugins.tokenizers.hf import HFTokenizer

Make = Callable[..., GGUFTokenizer]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), num_layers=1, vocab_size=1100, tokenizer_size=1000)


@pytest.fixture
def make(checkpoint: Path, tmp_path: Path) -> Make:
    def make(config: EngineConfig | None = None, **metadata: Any) -> GGUFTokenizer:
        changed = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
        if "chat_template" in metadata:
            changed["tokenizer.chat_template"] = changed.pop("tokenizer.ggml.chat_template")
        path = write_gguf(checkpoint, tmp_path / "model.gguf", metadata=changed)
        return GGUFTokenizer(ModelSource("model", str(path), "gguf", "gguf", {}), config)

    return make


def spelled(tokenizer: GGUFTokenizer, text: str) -> list[str | None]:
    return [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False)]


def test_it_is_the_tokenizer_that_the_file_was_written_from(make: Make, checkpoint: Path) -> None:
    ours, original = make(), HFTokenizer(ModelSource("model", str(checkpoint), "", "hf", {}))
    for text in ("the capital of France<|im_end|>", "  two  words\n\n12", "日本 🙂"):
        assert ours.encode(text) == original.encode(text)
    assert (ours.vocab_size, ours.eos_token_id, ours.special_ids) == (1000, 0, original.special_ids)
    messages = [{"role": "user", "content": "hello"}]
    assert ours.apply_chat_template(messages) == original.apply_chat_template(messages)


def test_padding_of_the_vocabulary_is_no_token(make: Make) -> None:
    tokenizer = make()
    assert tokenizer.token_text(1050) is None
    assert tokenizer.decode([1050]) == ""


def test_bos_and_eos_are_put_around_a_prompt_if_the_file_says_so(make: Make) -> None:
    bare = make().encode("the world")
    assert make(add_bos_token=True).encode("the world") == [1, *bare]
    assert make(add_bos_token=True, add_eos_token=True).encode("the world") == [1, *bare, 0]
    assert make(add_bos_token=True).encode("the world", add_special_tokens=False) == bare
    assert make(add_bos_token=..., pre="llama-bpe").encode("the world")[0] == 1
    assert make(add_bos_token=..., pre="qwen2").encode("the world")[0] != 1
    assert make(add_bos_token=True, bos_token_id=...).encode("the world") == bare


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "it's  12345!\n\n6", ["it", "'s", " ", " 12345", "!", "\n", "\n", "6"]),
        ("smollm", "it's  12345!\n\n6", ["it", "'s", "  ", "1", "2", "3", "4", "5", "!", "\n\n", "6"]),
        ("qwen2", "it'S  123!\n\n6", ["it", "'S", " ", " ", "1", "2", "3", "!\n\n", "6"]),
        ("llama-bpe", "it'S  12345!\n\n6", ["it", "'S", " ", " ", "123", "45", "!\n\n", "6"]),
        ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
        ("gpt-4o", "helloWorld's 12", ["hello", "World's", " ", "12"]),
    ],
)
def test_pre_tokenizers_cut_as_they_are_named(pre: str, text: str, expected: list[str]) -> None:
    pieces = PRE_TOKENIZERS[pre].build().pre_tokenize_str(text)
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in pieces] == expected


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_the_text(make: Make, pre: str) -> None:
    tokenizer = make(pre=pre)
    for text in ("Hello, it's 12345  words\n\n  and\ttabs\r\n", "ÉCOLE École don'T I'LL", "e\u0301 日本語 नमस्ते 🙂\u3000"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "expected"), [("from-the-future", "unknown pre-tokenizer 'from-the-future'"), (..., "names no pre")]
)
def test_an_unknown_pre_tokenizer_warns_and_falls_back(
    make: Make, caplog: pytest.LogCaptureFixture, pre: Any, expected: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert spelled(make(pre=pre), "a  12") == spelled(make(pre="gpt-2"), "a  12")
    assert expected in caplog.text
    assert "model.gguf" in caplog.text


def test_words_in_the_vocabulary_stay_whole_where_the_model_was_made_so(make: Make, checkpoint: Path) -> None:
    tokens = make()._backend.get_vocab()
    words = sorted(tokens, key=tokens.__getitem__)
    words[999] = "xyzzy"
    kinds = [3] * 4 + [1] * 996 + [5] * 100
    texts = words[:1000] + [f"[PAD{i}]" for i in range(100)]
    merges = _merges(checkpoint, words)
    assert spelled(make(tokens=texts, token_type=kinds, merges=merges, pre="llama-bpe"), "xyzzy") == ["xyzzy"]
    assert spelled(make(tokens=texts, token_type=kinds, merges=merges, pre="dbrx"), "xyzzy") != ["xyzzy"]


def _merges(checkpoint: Path, words: list[str]) -> list[str]:
    known = set(words)
    merges = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["merges"]
    return [" ".join(pair) for pair in merges if "".join(pair) in known]


def test_control_tokens_may_be_spelled_with_any_character(make: Make) -> None:
    tokens, kinds = _with_token(make, "<｜begin▁of▁sentence｜>", 3)
    tokenizer = make(tokens=tokens, token_type=kinds)
    ids = tokenizer.encode("a<｜begin▁of▁sentence｜>b")
    assert ids[1] == 1000
    assert 1000 in tokenizer.special_ids
    assert tokenizer.decode(ids) == "ab"


def test_user_defined_tokens_are_found_whole_but_are_text(make: Make) -> None:
    tokens, kinds = _with_token(make, "<think> ", 4)
    tokenizer = make(tokens=tokens, token_type=kinds)
    ids = tokenizer.encode("a<think> b")
    assert ids[1] == 1000
    assert 1000 not in tokenizer.special_ids
    assert tokenizer.decode(ids) == "a<think> b"


def _with_token(make: Make, token: str, kind: int) -> tuple[list[str], list[int]]:
    vocab = make()._backend.get_vocab()
    return [*sorted(vocab, key=vocab.__getitem__), token], [3] * 4 + [1] * 996 + [kind]


def test_named_templates_and_the_option(make: Make) -> None:
    messages = [{"role": "user", "content": "the world"}]
    option = make(EngineConfig(model="x", chat_template="{{ messages[0].content }}"))
    assert option.apply_chat_template(messages) == option.encode("the world", add_special_tokens=False)
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        make(chat_template=...).apply_chat_template(messages)


def test_a_file_without_an_end_token_has_none(make: Make) -> None:
    assert make(eos_token_id=...).eos_token_id is None


def test_ids_outside_the_vocabulary_are_ignored_with_a_warning(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    assert make(eos_token_id=5000).eos_token_id is None
    assert "eos_token_id is 5000, outside the vocabulary of 1000" in caplog.text


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"tokens": ...}, "no tokenizer.ggml.tokens"),
        ({"model": ...}, "it has no tokenizer.ggml.model"),
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert', supported are 'gpt2' and 'llama'"),
        ({"merges": ...}, "no tokenizer.ggml.merges"),
        ({"merges": ["absent1 absent2"]}, "merges do not fit its tokens"),
        ({"token_type": [1, 1]}, "token_type has 2 items for 1100 tokens"),
        ({"model": "llama", "merges": ...}, "neither tokenizer.ggml.scores nor .merges"),
    ],
)
def test_what_metadata_lack_is_named_with_the_remedy(make: Make, metadata: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelNotFound, match=expected) as error:
        make(**metadata)
    assert "model.gguf" in str(error.value)
    assert "tokenizer option" in str(error.value)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 99, 0, 0))
    with pytest.raises(ModelNotFound, match="version 99"):
        GGUFTokenizer(ModelSource("x", str(tmp_path / "x.gguf"), "gguf", "gguf", {}))
