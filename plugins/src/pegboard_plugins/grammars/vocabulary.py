"""The vocabulary of a model, as the grammar library wants it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pegboard.engine.eos import eos_token_ids

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from pegboard.plugins import Composition


class _Tokens:
    """What ``LLTokenizer`` reads of a tokenizer. It would tokenize forced text, but no text is forced here."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokens: Sequence[bytes], eos_token_id: int) -> None:
        self.tokens, self.eos_token_id = tokens, eos_token_id

    def __call__(self, text: str) -> list[int]:
        raise AssertionError(f"forced text is tokenized: {text!r:.40}")


def make_vocabulary(tokens: Sequence[bytes | None], eos_ids: Iterable[int]) -> LLTokenizer:
    """``tokens``: what each id stands for, None (never allowed) for special ids and ids without a token. Every one of
    ``eos_ids`` may end an answer, and stands for nothing else. Raises ``ValueError`` without any.

    Takes some 0.1 s per 50,000 ids, with the interpreter locked.
    """
    from llguidance import LLTokenizer

    ends = list(dict.fromkeys(eos_ids))
    if not ends:
        raise ValueError(
            "the model names no end-of-sequence token, so that an answer could never end; state eos_token_id in its "
            "generation_config.json"
        )
    spelled = [b"" if token is None else token for token in tokens]
    for token_id in ends:
        spelled[token_id] = b""
    return LLTokenizer(_Tokens(spelled, ends[0]), eos_token=ends)  # type: ignore[arg-type]


def vocabulary_of(composition: Composition) -> LLTokenizer:
    """That of the composition's tokenizer, as large as the model's embedding."""
    spec = composition.spec
    tokenizer = composition.create("tokenizer")
    known = min(spec.vocab_size, tokenizer.vocab_size)
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(known)]
    tokens += [None] * (spec.vocab_size - known)
    return make_vocabulary(tokens, eos_token_ids(spec, composition.source, tokenizer))


@functools.cache
def byte_vocabulary() -> LLTokenizer:
    """One token per byte, and an end: enough to see whether a grammar can be served, before a model's vocabulary is there."""
    return make_vocabulary([*(bytes([byte]) for byte in range(256)), None], [256])
