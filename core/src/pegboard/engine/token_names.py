"""Names of single tokens, as lists of log probabilities show them."""

from __future__ import annotations

from pegboard.contracts.tokenizer import Tokenizer
from pegboard.engine.outputs import Logprob
from pegboard.wire import Logprobs


class TokenNames:
    """Text and bytes of ids, each looked up once. See ``Logprob`` for what they are."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes | None]] = {}

    def __getitem__(self, token_id: int) -> tuple[str, bytes | None]:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> tuple[str, bytes | None]:
        data = self._tokenizer.token_bytes(token_id)
        if data is None:
            return self._tokenizer.token_text(token_id) or "", None
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


def named_logprobs(entry: Logprobs, names: TokenNames | None) -> dict[int, Logprob]:
    """The wire's columns as a dict, with ranks and names: chosen token first, alternatives in falling order. Without ``names``
    they stay None."""
    named: dict[int, Logprob] = {}
    rank = 0
    for place, (token_id, value) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
        if place:
            rank += 1 + (rank + 1 == entry.rank)  # the chosen token's place is taken
        name = (None, None) if names is None else names[token_id]
        named[token_id] = Logprob(value, rank if place else entry.rank, *name)
    return named
