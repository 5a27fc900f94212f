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
class AddedRequest:
    """A request that enters ``row`` of the resident batch. A preempted request that comes back is added again.

    ``output_token_ids`` is live: whenever it is read, it holds the output so far, which for a request that comes back is not
    empty at first. It may be kept until the row is removed. ``ext`` is the request's, by plugin name.
    """

    row: int
    request_id: str
    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    ext: dict[str, object]


@dataclass(frozen=True, slots=True)
class BatchDelta:
    """How the resident batch changed: rows removed, then rows moved as (from, to), then requests added. Rows are in
    ``range(max_num_seqs)``; a row that is given to another request without having been removed does not occur."""

    removed: Sequence[int] = ()
    moved: Sequence[tuple[int, int]] = ()
    added: Sequence[AddedRequest] = ()


class LogitsProcessor(abc.ABC):
    """One per worker, constructed with ``config``, ``composition`` and ``options``. Named by ``sampling.logits_processors``.

    Invariants: state follows from the deltas alone; what happens to a row depends on that row's request only.
    """

    argmax_invariant: bool = False
    """True if it never changes which logit is the highest: skipped for greedy rows, and applied after temperature."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise ``ValueError`` for parameters it cannot serve. Runs in the front end, once per request."""

    @abc.abstractmethod
    def update_state(self, delta: BatchDelta | None) -> None:
        """Called once per step, before ``apply``; None if nothing changed."""

    def concerns(self, rows: Sequence[int]) -> Sequence[int]:
        """Those of ``rows`` that ``apply`` would change; the others cost nothing. All of them unless overridden."""
        return rows

    @abc.abstractmethod
    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Change float32 ``logits`` [N, vocab_size], whose i-th row belongs to batch row ``rows[i]``; in place or not. Only rows
        that ``concerns`` named are given. What it raises fails the step, and the engine with it."""
