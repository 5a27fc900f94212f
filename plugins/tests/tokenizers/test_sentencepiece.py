"""SentencePiece vocabularies in GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pegboard.contracts.model_source import ModelSource
from pegboard.contracts.tokenizer import Tokenizer
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.conformance.tokenizer import TEXTS, TokenizerConformance
from pegboard.testing.gguf_files import write_gguf
from pegboard_plugins.tokenizers.gguf import GGUFTokenizer
from pegboard_plugins.tokenizers.gguf_sentencepiece import merges_from_scores

WORDS = ("▁the", "▁world", "▁of", "▁capital", "▁France", "hello", "▁hello", "▁Paris", "▁▁▁▁", "ing", "▁12", "é", "▁café", "日本")


def vocabulary() -> dict[str, Any]:
    """Control tokens, the 256 bytes, then pieces, each better scored than the pieces after it."""
    pieces: list[str] = []
    for word in WORDS:
        pieces += [word[:i] for i in range(2, len(word) + 1)]
    letters = sorted({letter for word in WORDS for letter in word} | set("abcdefghijklmnopqrstuvwxyz,.!?"))
    pieces = [*dict.fromkeys(pieces), "<think>"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys([*pieces, *letters])]
    kinds = [2, 3, 3, *[6] * 256, *(4 if token == "<think>" else 1 for token in tokens[259:])]
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": kinds,
        "scores": [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)],
        "merges": ...,
        "pre": ...,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": ...,
    }


def write(folder: Path, **changed: Any) -> Path:
    make_checkpoint(folder / "checkpoint", num_layers=1)
    metadata = {f"tokenizer.ggml.{key}": value for key, value in (vocabulary() | changed).items()}
    return write_gguf(folder / "checkpoint", folder / "spm.gguf", metadata=metadata)


def load(folder: Path, **changed: Any) -> GGUFTokenizer:
    return GGUFTokenizer(ModelSource("spm", str(write(folder, **changed)), "gguf", "gguf", {}))


class TestContract(TokenizerConformance):
    byte_level = False
    path: str

    @pytest.fixture(autouse=True)
    def write_file(self, tmp_path: Path) -> None:
        self.path = str(write(tmp_path))

    def make(self) -> Tokenizer:
        return GGUFTokenizer(ModelSource("spm", self.path, "gguf", "gguf", {}))


def test_pieces_are_joined_best_score_first(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    ids = tokenizer.encode("hello the world")
    assert [tokenizer.token_text(token_id) for token_id in ids] == ["<s>", "▁hello", "▁the", "▁world"]
    assert tokenizer.decode(ids) == "hello the world"


def test_characters_without_a_piece_become_bytes(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    ids = tokenizer.encode("the 🙂", add_special_tokens=False)
    assert [tokenizer.token_text(token_id) for token_id in ids] == ["▁the", "▁", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
    assert tokenizer.decode(ids) == "the 🙂"


def test_control_tokens_are_found_and_user_defined_ones_kept(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    ids = tokenizer.encode("<s>hello</s><think>", add_special_tokens=False)
    assert [tokenizer.token_text(token_id) for token_id in ids][-2:] == ["</s>", "<think>"]
    assert ids[0] == 1
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode(ids).endswith("hello<think>")


def test_the_space_in_front_is_the_files_choice(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, add_space_prefix=False)
    ids = tokenizer.encode("hello the", add_special_tokens=False)
    assert [tokenizer.token_text(token_id) for token_id in ids] == ["hello", "▁the"]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_names_and_bos_default_to_the_usual_ones(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, bos_token_id=..., eos_token_id=..., unknown_token_id=...)
    assert tokenizer.eos_token_id == 2
    assert tokenizer.encode("hello")[0] == 1
    assert load(tmp_path, add_bos_token=False).encode("hello")[0] != 1


def test_merges_in_the_file_are_used(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, merges=["t h", "th e", "▁ the"], tokens=[*vocabulary()["tokens"], "th", "the"],
                     token_type=[*vocabulary()["token_type"], 1, 1], scores=...)  # fmt: skip
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.encode("the")] == ["<s>", "▁the"]


def test_merges_from_scores_prefer_better_pieces() -> None:
    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5, "<s>": 6}
    merges = merges_from_scores(vocab, [0, 0, 0, -2.0, -1.0, -3.0, 0], frozenset({6}))
    assert merges == [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]


@pytest.mark.slow
def test_ids_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = GGUFTokenizer(ModelSource("spm", str(path), "gguf", "gguf", {}))
    for text in (
        *TEXTS,
        "hello the world of café",
        "  the capital of France, Paris",
        "日本日 ing\n12",
        "<s>the</s> world<think>x",
    ):
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.encode(text, False) == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True), text
