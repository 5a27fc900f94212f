"""The standard tokenizers keep the contract."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from pegboard.contracts.model_source import ModelSource
from pegboard.contracts.tokenizer import Tokenizer
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.conformance.tokenizer import TokenizerConformance
from pegboard.testing.gguf_files import write_gguf
from pegboard.testing.tiny_tokenizer import write_tokenizer
from pegboard_plugins.tokenizers.gguf import GGUFTokenizer
from pegboard_plugins.tokenizers.hf import HFTokenizer


def checkpoint(tmp_path_factory: pytest.TempPathFactory, *, bos: bool) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    return make_checkpoint(folder, num_layers=1, vocab_size=1100, tokenizer_size=1000, bos=bos)


class WithSource(TokenizerConformance):
    bos = False

    folder: ClassVar[Path]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def write(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.folder = checkpoint(tmp_path_factory, bos=cls.bos)


class TestHF(WithSource):
    def make(self) -> Tokenizer:
        return HFTokenizer(source(self.folder, "hf"))


class TestHFWithBos(TestHF):
    bos = True


class TestHFByteFallback(WithSource):
    """A vocabulary as converted from SentencePiece's."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def write(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.folder = tmp_path_factory.mktemp("byte_fallback")
        write_tokenizer(cls.folder, byte_fallback=True)

    def make(self) -> Tokenizer:
        return HFTokenizer(source(self.folder, "hf"))


class TestGGUF(WithSource):
    def make(self) -> Tokenizer:
        path = self.folder / "model.gguf"
        if not path.exists():
            write_gguf(self.folder, path)
        return GGUFTokenizer(source(path, "gguf"))


class TestGGUFWithBos(TestGGUF):
    bos = True


class TestGGUFWithoutNames(WithSource):
    """A file that names neither BOS nor EOS and has no template."""

    def make(self) -> Tokenizer:
        path = self.folder / "bare.gguf"
        if not path.exists():
            names = ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.chat_template")
            write_gguf(self.folder, path, metadata=dict.fromkeys(names, ...))
        return GGUFTokenizer(source(path, "gguf"))


def source(path: Path, kind: str) -> ModelSource:
    return ModelSource(str(path), str(path), "", kind, {})
