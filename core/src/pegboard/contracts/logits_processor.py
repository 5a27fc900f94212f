"""LogitsProcessor: changes logits between the model and the choice."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pegboard.wire import SamplingParams

if TYPE_CHECKING:
    import torch

API: Final = 1


@dataclass(frozen=True, slots=True)
class BatchDelta:
    """How the resident batch changed: rows removed, then moved (from, to), then added (row, params, prompt, output)."""

    removed: Sequence[int] = ()
    moved: Sequence[tuple[int, int]] = ()
    added: Sequence[tuple[int, SamplingParams, Sequence[int], Sequence[int]]] = ()


class LogitsProcessor(abc.ABC):
    """One per worker. Invariants: state follows from the deltas alone; rows are independent."""

    argmax_invariant: bool = False
    """True if it never changes which logit is the highest: skipped for greedy rows."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise ``ValueError`` for parameters it cannot serve. Runs in the front end."""

    @abc.abstractmethod
    def update_state(self, delta: BatchDelta | None) -> None:
        """Called once per step, before ``apply``; None if nothing changed."""

    @abc.abstractmethod
    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Change ``logits`` [N, vocab_size], whose i-th row belongs to batch row ``rows[i]``; in place or not."""
