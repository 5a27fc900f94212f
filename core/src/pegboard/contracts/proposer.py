"""Proposer: drafts tokens that the model then verifies in one step (speculative decoding)."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Final

API: Final = 1


class Proposer(abc.ABC):
    """Lifecycle: ``load`` → ``warm_up`` → ``propose`` per step. Invariants: drafts never change the distribution of the
    output (the verifier sees to it); at most ``max_drafts`` tokens per row; an empty list abstains."""

    max_drafts: int

    @abc.abstractmethod
    def load(self) -> None: ...

    def warm_up(self) -> None: ...

    @abc.abstractmethod
    def propose(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Drafts for each row, given all its known tokens."""
