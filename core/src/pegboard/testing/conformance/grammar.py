"""Conformance of a GrammarBackend. Subclass and give ``make``; name the ``kinds`` that it serves and a grammar of its dialect."""

from __future__ import annotations

import abc
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest

from pegboard.contracts.grammar import GrammarBackend, GrammarState
from pegboard.testing.conformance._grammar_cases import BAD, EOS, LANGUAGES, MASK_BYTES, TOKENS, VOCAB_SIZE, Language, composition
from pegboard.testing.list_tokenizer import ListTokenizer
from pegboard.wire import GrammarSpec

ENDS = frozenset(b'"}]c0')
"""Last bytes of tokens that a walk prefers now and then, so that endless languages come to an end."""
SPEAKING = [token_id for token_id, token in enumerate(TOKENS) if token is not None]


def mask_of(state: GrammarState, fill: int = 0x00) -> set[int]:
    """The ids that may come next. ``fill`` is in the row before."""
    row = bytearray([fill]) * MASK_BYTES
    state.fill_bitmask(memoryview(row))
    return {token_id for token_id in range(8 * MASK_BYTES) if row[token_id // 8] >> token_id % 8 & 1}


def encode(text: str) -> list[int]:
    return ListTokenizer(TOKENS).encode(text)


def spelled(token_ids: Sequence[int]) -> str:
    return b"".join(TOKENS[token_id] or b"" for token_id in token_ids).decode()


def walk(state: GrammarState, seed: int, limit: int = 400) -> list[int] | None:
    """Random tokens that the mask allows, up to the end of the language; None where that does not come within ``limit``."""
    choose = random.Random(seed)
    taken: list[int] = []
    for _ in range(limit):
        allowed = sorted(mask_of(state))
        assert state.terminated == (set(allowed) <= set(EOS)), "terminated: nothing but an end of sequence may follow"
        if set(allowed) & set(EOS) and (set(allowed) <= set(EOS) or choose.random() < 0.3):
            return taken
        ends = [token_id for token_id in allowed if (TOKENS[token_id] or b" ")[-1] in ENDS]
        candidates = ends if ends and choose.random() < 0.4 else [t for t in allowed if t not in EOS]
        assert candidates, f"nothing may follow {spelled(taken)!r}"
        taken.append(choose.choice(candidates))
        assert state.accept(taken[-1:]), f"the mask allows {TOKENS[taken[-1]]!r} after {spelled(taken[:-1])!r}, accept does not"
    return None


def _param(self: Any, request: pytest.FixtureRequest) -> Language:
    language: Language = request.param
    return language


class GrammarBackendConformance(abc.ABC):
    """``grammar``: a text of the backend's EBNF dialect for one or more ``"ab"`` in parentheses, as in ``(abab)``."""

    kinds: ClassVar[frozenset[str]] = frozenset({"json_schema", "json_object", "regex", "choice"})
    grammar: ClassVar[str] = ""

    @abc.abstractmethod
    def make(self, composition: Any) -> GrammarBackend: ...

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        served = [language for language in LANGUAGES if language.spec.kind in cls.kinds]
        cls.language = pytest.fixture(params=served, ids=lambda language: language.name)(_param)

    language: ClassVar[Any]
    """The fixture: one language after the other of those kinds that are served."""

    @pytest.fixture
    def backend(self) -> GrammarBackend:
        return self.make(composition())

    # -- languages ---------------------------------------------------------------------------------------------------

    def test_random_walks_end_in_the_language(self, backend: GrammarBackend, language: Language) -> None:
        backend.validate(language.spec)
        grammar = backend.compile(language.spec)
        walks = [walk(grammar.start(), seed) for seed in range(12)]
        assert all(walks) or (language.endless and any(walks))
        for taken in walks:
            assert taken is None or language.holds(spelled(taken)), f"{spelled(taken)!r} is not in the language"

    def test_texts_of_the_language_can_be_said(self, backend: GrammarBackend, language: Language) -> None:
        grammar = backend.compile(language.spec)
        for text in language.inside:
            assert language.holds(text), "a mistake in the case itself"
            for token_ids in (encode(text), [1 + byte for byte in text.encode()]):
                state = grammar.start()
                for token_id in token_ids:
                    assert token_id in mask_of(state)
                    assert state.accept([token_id])
                assert set(EOS) <= mask_of(state), f"an answer may end with {text!r}, with every end-of-sequence id"

    def test_other_texts_cannot(self, backend: GrammarBackend, language: Language) -> None:
        grammar = backend.compile(language.spec)
        for text in language.outside:
            assert not grammar.start().accept(encode(text)), text

    def test_the_dialect_of_grammars(self, backend: GrammarBackend) -> None:
        if not self.grammar:
            return
        spec = GrammarSpec("grammar", self.grammar)
        backend.validate(spec)
        state = backend.compile(spec).start()
        assert state.accept(encode("(abab"))
        assert mask_of(state) == {1 + ord(")"), 1 + ord("a"), *encode("ab"), *(t for t in SPEAKING if TOKENS[t] == b"a")}
        assert state.accept(encode(")"))
        assert mask_of(state) == set(EOS)

    @pytest.mark.parametrize("name", BAD)
    def test_what_cannot_be_served_is_refused_twice(self, backend: GrammarBackend, name: str) -> None:
        with pytest.raises(ValueError, match=r"\w{3,} \w+"):
            backend.validate(BAD[name])
        with pytest.raises(ValueError, match=r"\w{3,} \w+"):
            backend.compile(BAD[name])

    # -- states ------------------------------------------------------------------------------------------------------

    def test_mask_and_accept_agree_on_every_id(self, backend: GrammarBackend, language: Language) -> None:
        state = backend.compile(language.spec).start()
        for token_id in encode(language.inside[0]):
            allowed = mask_of(state)
            assert allowed == mask_of(state, 0xFF), "all of the row is written"
            assert allowed <= {*SPEAKING, *EOS}, "special ids and ids without a token are never allowed"
            for candidate in (*SPEAKING, *EOS):
                if state.accept([candidate]):
                    assert candidate in allowed
                    state.rollback(1)
                else:
                    assert candidate not in allowed
            for candidate in (-1, VOCAB_SIZE - 1, VOCAB_SIZE, 1 << 40):
                assert not state.accept([candidate])
            assert mask_of(state) == allowed, "what was tried has left no trace"
            assert state.accept([token_id])

    def test_accept_is_all_or_nothing(self, backend: GrammarBackend, language: Language) -> None:
        token_ids = encode(language.inside[0])
        state, other = backend.compile(language.spec).start(), backend.compile(language.spec).start()
        wrong = next(t for t in SPEAKING if t not in mask_of(other))
        assert not state.accept([wrong])
        for place in range(1, len(token_ids)):
            assert other.accept(token_ids[place - 1 : place])
            wrong = next(t for t in SPEAKING if t not in mask_of(other))
            assert not state.accept([*token_ids[:place], wrong])
        assert state.accept([])
        assert state.accept(token_ids)
        assert other.accept(token_ids[-1:])
        assert mask_of(state) == mask_of(other)
        assert state.terminated == other.terminated

    def test_rollback_is_exact(self, backend: GrammarBackend, language: Language) -> None:
        token_ids = encode(language.inside[-1])
        state, masks = backend.compile(language.spec).start(), []
        for token_id in token_ids:
            masks.append((mask_of(state), state.terminated))
            assert state.accept([token_id])
        masks.append((mask_of(state), state.terminated))
        for back in range(len(token_ids) + 1):
            state.rollback(back)
            assert (mask_of(state), state.terminated) == masks[len(token_ids) - back]
            assert state.accept(token_ids[len(token_ids) - back :])
            assert (mask_of(state), state.terminated) == masks[-1]

    def test_an_end_of_sequence_is_accepted_where_it_is_allowed(self, backend: GrammarBackend, language: Language) -> None:
        for text in language.inside:
            state = backend.compile(language.spec).start()
            assert state.accept(encode(text))
            before = mask_of(state), state.terminated
            for end in EOS:
                assert state.accept([end])
                assert state.terminated
                assert mask_of(state) == set(EOS)
                assert not state.accept(encode(text))
                state.rollback(1)
                assert (mask_of(state), state.terminated) == before
            state.rollback(len(encode(text)))
            assert state.accept([*encode(text), EOS[0]])
            state.rollback(len(encode(text)) + 1)
            assert not state.accept([*encode(text)[:-1], EOS[0], *encode(text)[-1:]])

    def test_states_are_independent(self, backend: GrammarBackend, language: Language) -> None:
        grammar = backend.compile(language.spec)
        first = grammar.start()
        begin = mask_of(first)
        assert first.accept(encode(language.inside[0]))
        second = grammar.start()
        assert mask_of(second) == begin
        assert second.accept(encode(language.inside[-1]))
        first.rollback(len(encode(language.inside[0])))
        assert mask_of(first) == begin

    # -- threads -----------------------------------------------------------------------------------------------------

    def test_several_threads_compile(self, language: Language) -> None:
        backend = self.make(composition())
        begin = mask_of(backend.compile(language.spec).start())
        fresh = self.make(composition())

        def compiled(seed: int) -> tuple[set[int], list[int] | None]:
            grammar = fresh.compile(language.spec)
            return mask_of(grammar.start()), walk(grammar.start(), seed % 2, limit=50)

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(compiled, range(8)))
        assert all(mask == begin for mask, _ in found)
        assert all(taken == found[seed % 2][1] for seed, (_, taken) in enumerate(found))
