"""SentencePiece's BPE vocabularies, as GGUF files keep them: pieces with scores, "▁" for a space, bytes for what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

SPACE = "▁"


def sentencepiece_backend(
    tokens: Sequence[str],
    *,
    scores: Sequence[float] | None,
    merges: Sequence[tuple[str, str]] | None,
    skip: Iterable[int],
    unknown: int | None,
    space_prefix: bool,
) -> Backend:
    """A tokenizer that gives SentencePiece's ids. ``merges``, or else what the ``scores`` imply; pieces at the ids in ``skip``
    are never made from text. ``space_prefix``: a space is put in front of a text, and dropped again when decoding.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if merges is None:
        assert scores is not None
        merges = merges_from_scores(vocab, scores, frozenset(skip))
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=list(merges),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first" if space_prefix else "never", split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_from_scores(vocab: dict[str, int], scores: Sequence[float], skip: frozenset[int]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, best score first: the order in which SentencePiece joins neighbours.

    Among ways with equal scores longer left halves come first, as in tokenizers converted by Hugging Face.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for piece, token_id in vocab.items():
        if token_id in skip:
            continue
        ways = [(piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in vocab and piece[i:] in vocab]
        ways.sort(key=lambda way: (vocab[way[0]], vocab[way[1]]))
        found.extend((scores[token_id], len(left), len(right), left, right) for left, right in ways)
    found.sort(key=lambda way: way[:3], reverse=True)
    return [way[3:] for way in found]
