"""Output as it is streamed: ids through the incremental detokenizer one by one, and a check of what the pieces promise."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.contracts.tokenizer import Tokenizer
from pegboard.engine.detokenizer import REPLACEMENT, IncrementalDetokenizer


def stream(
    tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
) -> list[str]:
    """The piece that each of ``ids`` brings, and what is left at the end."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, spaces_between_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def check_stream(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> list[str]:
    """``stream``, asserting that the pieces join to the decoding of all ids, and that each comes as soon as it can: held back
    are only U+FFFD at the end of what ``decode`` makes of the ids so far. (So a piece holds one only where ``decode`` has it.)
    """
    pieces = stream(tokenizer, ids, skip_special_tokens)
    whole = tokenizer.decode(ids, skip_special_tokens)
    given = ""
    for count, piece in enumerate(pieces[:-1], start=1):
        given += piece
        assert whole.startswith(given), f"after {count} of {list(ids)}: gave {given!r} of {whole!r}"
        certain = tokenizer.decode(ids[:count], skip_special_tokens).rstrip(REPLACEMENT)
        assert len(given) >= len(certain), f"after {count} of {list(ids)}: gave {given!r}, certain is {certain!r}"
    assert given + pieces[-1] == whole
    return pieces
