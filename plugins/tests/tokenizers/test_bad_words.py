"""Bad words become every spelling that real tokenizers give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.contracts.model_source import ModelSource
from pegboard.contracts.tokenizer import Tokenizer
from pegboard.engine.bad_words import BadWords
from pegboard.testing.tiny_tokenizer import write_tokenizer
from pegboard_plugins.tokenizers.hf import HFTokenizer

WORDS = [
    "Paris",
    "the",
    "water",
    "zebra",
    "the world",
    "a b",
    "aaa",
    "New-York's",
    "漢字",
    "🙂",
    "e\u0301",
    "x\ny",
    "7",
    "<|im_end|>",
]


@pytest.fixture(scope="module", params=["byte level", "byte level with BOS", "byte fallback", "byte fallback with BOS"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, byte_fallback="fallback" in request.param, bos="BOS" in request.param)
    return HFTokenizer(ModelSource(str(folder), str(folder), "", "hf", {}))


def forms(tokenizer: Tokenizer, *words: str) -> list[list[int]]:
    return BadWords(tokenizer, tokenizer.vocab_size).token_ids(words)


def is_blocked(tokens: list[int], sequences: list[list[int]]) -> bool:
    return any(tokens[i : i + len(s)] == s for s in sequences for i in range(len(tokens) - len(s) + 1))


@pytest.mark.parametrize("given", ["{}", " {}", "   {}"])
@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_found_at_the_start_and_after_a_space(tokenizer: Tokenizer, word: str, given: str) -> None:
    sequences = forms(tokenizer, given.format(word))
    for before in ("", " ", "  ", "\n", "so ", "漢 ", "(", "say: "):
        tokens = tokenizer.encode(before + word, add_special_tokens=False)
        assert is_blocked(tokens, sequences), f"{before + word!r}"
        inside = tokenizer.encode("so\n" + before + word, add_special_tokens=False)
        start = len(tokenizer.encode("so\n", add_special_tokens=False))
        assert is_blocked(inside[start:], sequences), f"{before + word!r} after a prompt"


@pytest.mark.parametrize("word", WORDS)
def test_a_sequence_spells_the_word_and_nothing_else(tokenizer: Tokenizer, word: str) -> None:
    for sequence in forms(tokenizer, word):
        data = b"".join(tokenizer.token_bytes(i) or (tokenizer.token_text(i) or "").encode() for i in sequence)
        assert data.decode().lstrip(" ") == word


def test_other_words_stay(tokenizer: Tokenizer) -> None:
    sequences = forms(tokenizer, "the world", "zebra")
    for text in ("the", " the", "world", "the water", "zeb", "a zebu"):
        assert not is_blocked(tokenizer.encode(text, add_special_tokens=False), sequences)


def test_nothing_is_listed_twice_or_beyond_the_model(tokenizer: Tokenizer) -> None:
    many = [f"word{i}" for i in range(200)]
    sequences = forms(tokenizer, *many, *many, " word7")
    assert len(sequences) == len({tuple(s) for s in sequences})
    limit = max(max(s) for s in sequences)
    few = BadWords(tokenizer, limit).token_ids(many)
    assert max(max(s) for s in few) < limit
    assert few


def test_spaces_alone_are_a_word(tokenizer: Tokenizer) -> None:
    [space] = forms(tokenizer, " ")
    assert [tokenizer.token_bytes(i) for i in space] == [b" "]
