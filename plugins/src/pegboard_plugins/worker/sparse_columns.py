"""SparseColumns: what only some of the resident requests ask of the sampler, by slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from pegboard.contracts.sampler import TokenCounts
from pegboard.wire import NewRequestData
from pegboard_plugins.sampling.bad_words import BadWords
from pegboard_plugins.worker.token_counts import ResidentCounts

Value = TypeVar("Value")


class SparseColumns:
    """Everything is made once, when a request enters; a request that asks for nothing is in none of the dicts."""

    def __init__(self) -> None:
        self.logit_bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.allowed_token_ids: dict[int, np.ndarray] = {}
        self.bad_words: dict[int, BadWords] = {}
        self._counts: dict[int, ResidentCounts] = {}

    def enter(self, request: NewRequestData) -> None:
        slot, params = request.slot, request.sampling
        if params.logit_bias:
            ids = np.array(list(params.logit_bias), np.int64)
            self.logit_bias[slot] = ids, np.array(list(params.logit_bias.values()), np.float32)
        if params.allowed_token_ids is not None:
            self.allowed_token_ids[slot] = np.unique(np.array(params.allowed_token_ids, np.int64))
        if request.bad_word_ids:
            self.bad_words[slot] = BadWords(request.bad_word_ids)
        if params.has_penalties:
            self._counts[slot] = ResidentCounts(request.prompt_len)

    def leave(self, slot: int) -> None:
        for column in (self.logit_bias, self.allowed_token_ids, self.bad_words, self._counts):
            column.pop(slot, None)

    def token_counts(self, slots: np.ndarray, lengths: np.ndarray, token_ids: np.ndarray) -> dict[int, TokenCounts]:
        """By index in ``slots`` [N], of requests with penalties: what they know in ``token_ids[slots[i], :lengths[i]]``."""
        return {row: self._counts[slot].of(token_ids[slot, : lengths[row]]) for row, slot in rows_with(self._counts, slots)}


def rows_with(column: Mapping[int, Value], slots: np.ndarray) -> list[tuple[int, int]]:
    """(index in ``slots`` [N], slot) of those that ``column`` has."""
    return [(row, slot) for row, slot in enumerate(slots.tolist()) if slot in column] if column else []


def by_row(column: Mapping[int, Value], slots: np.ndarray) -> dict[int, Value]:
    """What ``column`` has, by index in ``slots`` [N]."""
    return {row: column[slot] for row, slot in rows_with(column, slots)}
