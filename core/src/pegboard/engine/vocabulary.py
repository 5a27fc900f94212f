"""Which token ids there are, and the checks of everything in a request that names some."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pegboard.wire import SamplingParams


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """``embedded`` ids have an embedding, so that a prompt may hold them. ``known`` is the tokenizer's vocabulary: ids from there
    on only pad the embedding, have no token, and are never chosen."""

    embedded: int
    known: int

    @property
    def choosable(self) -> int:
        """Ids below this one can be chosen."""
        return min(self.embedded, self.known)

    def check_prompt(self, name: str, token_ids: Sequence[Any]) -> list[int]:
        """``token_ids`` as a list of plain ints, or ``ValueError`` naming the first that is not an id."""
        return check_token_ids(name, token_ids, self.embedded)

    def check_params(self, params: SamplingParams, stop_token_ids: Sequence[int], bad_word_ids: Sequence[Sequence[int]]) -> None:
        """Raise ``ValueError`` for ids that cannot be chosen, for more alternatives than there are ids, and where nothing is left
        to choose. ``stop_token_ids``, ``bad_word_ids``: as they go to the engine core."""
        size = self.choosable
        if params.allowed_token_ids is not None:
            check_token_ids("allowed_token_ids", params.allowed_token_ids, size)
        if params.logit_bias:
            wrong = next((token_id for token_id in params.logit_bias if not 0 <= token_id < size), None)
            if wrong is not None:
                raise ValueError(f"logit_bias: {wrong!r} is not in the model's vocabulary; ids are in [0, {size})")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > size:
                raise ValueError(f"{name}={count} is more than the {size} ids of the vocabulary; give at most {size}")
        self._check_choice(params, stop_token_ids, bad_word_ids)

    def _check_choice(self, params: SamplingParams, stop_token_ids: Sequence[int], bad_word_ids: Sequence[Sequence[int]]) -> None:
        if params.allowed_token_ids is None:
            return
        words = {sequence[0] for sequence in bad_word_ids if len(sequence) == 1}
        ends: Collection[int] = stop_token_ids if params.min_tokens else ()
        if not {*params.allowed_token_ids} - words - {*ends}:
            raise ValueError(
                "allowed_token_ids leaves nothing to choose: every id in it is a bad word"
                + (f", or ends the answer before min_tokens={params.min_tokens}" if ends else "")
                + "; allow another id"
            )


def check_token_ids(name: str, token_ids: Sequence[Any], vocab_size: int) -> list[int]:
    """``token_ids`` as a list of plain ints in ``range(vocab_size)``, or ``ValueError`` naming the first that is not."""
    ids = token_ids if isinstance(token_ids, list) else list(token_ids)
    if not ids:
        return []
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return list(ids)
    for i, token_id in enumerate(ids):
        index = getattr(token_id, "__index__", None)
        if isinstance(token_id, bool) or index is None:
            raise ValueError(f"{name}[{i}]={token_id!r:.80} is not a token id; it must be an integer in [0, {vocab_size})")
        if not 0 <= index() < vocab_size:
            raise ValueError(f"{name}[{i}]={token_id!r:.80} is not in the model's vocabulary; ids are in [0, {vocab_size})")
    return [int(t) for t in ids]
