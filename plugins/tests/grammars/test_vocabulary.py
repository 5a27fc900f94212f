"""The vocabulary that grammars are compiled for: the model's, as its tokenizer spells it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from pegboard.config import EngineConfig
from pegboard.contracts.grammar import GrammarState
from pegboard.contracts.model import ModelSpec
from pegboard.testing.fake_composition import FakeComposition
from pegboard.testing.list_tokenizer import ListTokenizer
from pegboard.wire import GrammarSpec
from pegboard_plugins.grammars.llguidance_backend import LLGuidanceBackend

TOKENS = [None, b"a", b"b", b"ab", b"a", "é".encode()[:1], "é".encode()[1:]]


def spec(vocab_size: int, eos: tuple[int, ...]) -> ModelSpec:
    return ModelSpec(
        architecture="Fake", vocab_size=vocab_size, hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_size=8,
        max_model_len=99, eos_token_ids=eos,
    )  # fmt: skip


def start(regex: str, *, vocab_size: int = 7, eos: tuple[int, ...] = (0,), tokenizer: Any = None) -> GrammarState:
    parts = {"tokenizer": lambda: tokenizer or ListTokenizer(TOKENS)}
    backend = LLGuidanceBackend(FakeComposition(EngineConfig(model="x"), parts, spec(vocab_size, eos)))  # type: ignore[arg-type]
    return backend.compile(GrammarSpec("regex", regex)).start()


def allowed(state: GrammarState, num_words: int = 1) -> list[int]:
    row = bytearray(4 * num_words)
    state.fill_bitmask(memoryview(row))
    return [token_id for token_id in range(32 * num_words) if row[token_id // 8] >> token_id % 8 & 1]


def test_ids_with_equal_bytes_and_parts_of_characters() -> None:
    state = start("(a|ab|é)*")
    assert allowed(state) == [0, 1, 3, 4, 5]
    assert state.accept([5])
    assert allowed(state) == [6]
    assert state.accept([6, 4])
    assert allowed(state) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("vocab_size", [7, 8, 31, 32, 33, 64, 96])
def test_the_model_may_have_more_ids_than_the_tokenizer(vocab_size: int) -> None:
    state = start("a[^x]*", vocab_size=vocab_size)
    num_words = -(-vocab_size // 32)
    assert allowed(state, num_words) == [1, 3, 4]
    assert state.accept([3])
    assert allowed(state, num_words) == [0, 1, 2, 3, 4, 5]
    assert not state.accept([vocab_size - 1]) or vocab_size == 7


def test_the_tokenizer_may_have_more_ids_than_the_model() -> None:
    state = start("a.*", vocab_size=3)
    assert allowed(state) == [1]
    assert not state.accept([3])


def test_every_end_of_sequence_id_ends_an_answer() -> None:
    tokenizer = ListTokenizer(TOKENS, eos_token_id=2)
    state = start("ab?", eos=(0, 6), tokenizer=tokenizer)
    assert allowed(state) == [1, 3, 4]
    assert state.accept([1])
    assert allowed(state) == [0, 2, 6], "2 spells b, but as an end of sequence it is none"
    assert not state.terminated
    for end in (0, 2, 6):
        assert state.accept([end])
        assert state.terminated
        assert allowed(state) == [0, 2, 6]
        state.rollback(1)
        assert not state.terminated


def test_a_model_without_an_end_of_sequence_is_told() -> None:
    with pytest.raises(ValueError, match="names no end-of-sequence token, so that an answer could never end"):
        start("a", eos=())


def test_texts_that_the_vocabulary_cannot_spell() -> None:
    with pytest.raises(ValueError, match="no text can follow that the vocabulary can spell"):
        start("x")
    state = start("a(x|b)|ax")
    assert state.accept([1])
    assert allowed(state) == [2]
    dead = start("ax|b")
    assert dead.accept([1])
    with pytest.raises(ValueError, match="cannot go on from here: no text can follow that the vocabulary can spell"):
        allowed(dead)


def test_nothing_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, pegboard_plugins.plugin; import pegboard_plugins.grammars.llguidance_backend as backend;"
        "backend.LLGuidanceBackend(None); sys.exit('llguidance' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
