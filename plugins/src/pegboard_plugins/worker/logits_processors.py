"""Logits processors of a worker: made once, told in every step how the resident batch changed, named when they fail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import overload

import numpy as np
import torch

from pegboard.contracts.logits_processor import AddedRequest, BatchDelta, LogitsProcessor
from pegboard.wire import NewRequestData, SchedulerOutput
from pegboard_plugins.worker.input_batch import InputBatch


class OutputTokens(Sequence[int]):
    """The output so far of the request in one row of the batch, read from there each time."""

    __slots__ = ("_batch", "_row")

    def __init__(self, batch: InputBatch, row: int) -> None:
        self._batch, self._row = batch, row

    def __len__(self) -> int:
        return int(self._batch.num_tokens[self._row] - self._batch.prompt_lens[self._row])

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        found = self._tokens()[index]
        return found.tolist() if isinstance(index, slice) else int(found)

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens().tolist())

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    def __repr__(self) -> str:
        return repr(self._tokens().tolist())

    def _tokens(self) -> np.ndarray:
        row, batch = self._row, self._batch
        return batch.token_ids[row, batch.prompt_lens[row] : batch.num_tokens[row]]


class NamedProcessor(LogitsProcessor):
    """A processor whose failures say which one it is; as they come from a plugin, what it returns is checked too."""

    def __init__(self, name: str, inner: LogitsProcessor) -> None:
        self.name, self.inner = name, inner
        self.argmax_invariant = inner.argmax_invariant

    def update_state(self, delta: BatchDelta | None) -> None:
        try:
            self.inner.update_state(delta)
        except Exception as error:
            raise self._failure("update_state", error) from error

    def concerns(self, rows: Sequence[int]) -> Sequence[int]:
        try:
            found = self.inner.concerns(rows)
            if found is not rows and not set(found) <= set(rows):
                raise ValueError(f"it names rows {sorted(set(found) - set(rows))}, which it was not asked about")
        except Exception as error:
            raise self._failure("concerns", error) from error
        return found

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        try:
            changed = self.inner.apply(logits, rows)
            if not isinstance(changed, torch.Tensor) or changed.shape != logits.shape:
                kind = list(changed.shape) if isinstance(changed, torch.Tensor) else type(changed).__name__
                raise ValueError(f"it must return logits of the shape {list(logits.shape)}, and returned {kind}")
        except Exception as error:
            raise self._failure("apply", error) from error
        return changed

    def _failure(self, method: str, error: Exception) -> RuntimeError:
        return RuntimeError(f"logits processor {self.name!r} failed in {method}: {type(error).__name__}: {error}")


class LogitsProcessors:
    """``active``: those that are on, in order. Nothing happens, and nothing is kept, where there are none."""

    def __init__(self, processors: Mapping[str, LogitsProcessor], batch: InputBatch) -> None:
        self.active: tuple[LogitsProcessor, ...] = tuple(NamedProcessor(name, each) for name, each in processors.items())
        self._batch = batch

    def update(self, plan: SchedulerOutput) -> None:
        """Tell each what ``plan`` changed; the batch has applied it. Raises ``RuntimeError`` naming a processor that fails."""
        if not self.active:
            return
        removed = plan.finished_slots + plan.preempted_slots
        added = [self._added(request) for request in plan.new_requests]
        delta = BatchDelta(removed=removed, added=added) if removed or added else None
        for processor in self.active:
            processor.update_state(delta)

    def _added(self, request: NewRequestData) -> AddedRequest:
        return AddedRequest(
            row=request.slot,
            request_id=request.request_id,
            params=request.sampling,
            prompt_token_ids=request.token_ids[: request.prompt_len],
            output_token_ids=OutputTokens(self._batch, request.slot),
            ext=request.ext,
        )
