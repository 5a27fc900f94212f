"""Bad words: from texts to the token sequences that must not be completed."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from pegboard.contracts.tokenizer import Tokenizer

_ANCHORS: Final = ("\n", "\x02")
"""What a word is put behind to see it inside a text: something that no tokenizer joins with what follows."""


class BadWords:
    """Finds every form that a tokenizer gives a word: at the start of a text and after a space, where a text begins and inside
    one.

    Byte-level vocabularies spell a word after a space with the space, those of sentencepiece also at the start of a text. But
    an answer begins inside a text, behind its prompt, so that each of them may use either form.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Forms with ids from ``vocab_size`` on are left out: they cannot be chosen."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._forms = functools.lru_cache(maxsize=1024)(self._forms_of)

    def token_ids(self, words: Iterable[str]) -> list[list[int]]:
        """Token sequences of all ``words``, without repetitions. Raises ``ValueError`` for a word that the vocabulary cannot
        spell: it could never appear."""
        found: dict[tuple[int, ...], None] = {}
        for i, word in enumerate(words):
            forms = self._forms(word)
            if not forms:
                raise ValueError(f"bad_words[{i}]={word!r:.80} cannot be written with the model's tokens; leave it out")
            found.update(dict.fromkeys(forms))
        return [list(form) for form in found if max(form) < self._vocab_size]

    def _forms_of(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Those that end with another one are left out: whoever completes them completes that one."""
        bare = word.lstrip(" ") or word
        forms = {tuple(form) for form in self._spellings(bare) if self._spells(form, bare)}
        return tuple(sorted(f for f in forms if not any(len(g) < len(f) and f[-len(g) :] == g for g in forms)))

    def _spellings(self, bare: str) -> Iterator[list[int]]:
        for text in (bare, " " + bare):
            yield self._encode(text)
            for anchor in _ANCHORS:
                before, whole = self._encode(anchor), self._encode(anchor + text)
                if before and whole[: len(before)] == before:
                    yield whole[len(before) :]

    def _spells(self, form: Sequence[int], bare: str) -> bool:
        """False where the tokenizer has no tokens for the word, but leaves characters out or puts one for the unknown instead.
        That it may change its case is no such thing."""
        return bool(form) and _plain(self._tokenizer.decode(form, skip_special_tokens=False)) == _plain(bare)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold().strip()
