"""What every logits processor must keep: its state follows from the deltas alone, and a row depends on its own request only.

Subclass ``LogitsProcessorConformance`` and give ``make``, and ``params`` or ``ext`` for requests on which it acts. Needs torch.
"""

from __future__ import annotations

import abc
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import pytest
import torch

from pegboard.contracts.logits_processor import AddedRequest, BatchDelta, LogitsProcessor
from pegboard.wire import SamplingParams

ROWS = 6


class Tokens(Sequence[int]):
    """No more than the contract promises: something to index and to iterate, which grows with the list behind it."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._tokens[index]


@dataclass
class ProcessedRequest:
    """The ``index``-th request of a test."""

    index: int
    params: SamplingParams
    ext: dict[str, object]
    prompt: list[int]
    output: list[int] = field(default_factory=list)

    def added(self, row: int) -> AddedRequest:
        return AddedRequest(row, f"request-{self.index}", self.params, Tokens(self.prompt), Tokens(self.output), self.ext)


Resident = dict[int, ProcessedRequest]
"""Row to the request in it."""


class LogitsProcessorConformance(abc.ABC):
    """The contract of ``pegboard.contracts.logits_processor``, as tests."""

    vocab_size = 40

    @abc.abstractmethod
    def make(self) -> LogitsProcessor:
        """A new processor."""

    def params(self, index: int) -> SamplingParams:
        """Of the ``index``-th request; they should differ, and the processor should act on some of them."""
        return SamplingParams()

    def ext(self, index: int) -> dict[str, object]:
        """Typed fields of the ``index``-th request, by plugin name."""
        return {}

    # how rows are looked at -----------------------------------------------------------------------------------------

    def request(self, index: int, output: int = 0) -> ProcessedRequest:
        """With a prompt of its own, and so many tokens of output."""
        draw = random.Random(index)
        prompt = [draw.randrange(self.vocab_size) for _ in range(1 + index % 5)]
        request = ProcessedRequest(index, self.params(index), self.ext(index), prompt)
        for _ in range(output):
            self.grow(request)
        return request

    def grow(self, request: ProcessedRequest) -> None:
        """One token more of output; few different ones, so that they repeat."""
        request.output.append(random.Random(1000 * request.index + len(request.output)).randrange(self.vocab_size // 4))

    def logits(self, request: ProcessedRequest) -> torch.Tensor:
        """[vocab_size] float32, what a model says at this point of the request."""
        generator = torch.Generator().manual_seed(1000 * request.index + len(request.output))
        return torch.randn(self.vocab_size, generator=generator) * 3

    def look(self, processor: LogitsProcessor, resident: Resident) -> dict[int, torch.Tensor]:
        """Row to its logits behind the processor, the rows being asked about in the order of ``resident``."""
        rows = list(resident)
        found = {row: self.logits(request) for row, request in resident.items()}
        wanted = list(processor.concerns(rows))
        assert set(wanted) <= set(rows), "concerns names rows that it was not asked about"
        assert len(set(wanted)) == len(wanted), "concerns names a row twice"
        if not wanted:
            return found
        before = torch.stack([found[row] for row in wanted])
        after = processor.apply(before, wanted)
        assert after.shape == before.shape
        assert after.dtype == torch.float32
        return found | dict(zip(wanted, after, strict=True))

    def fresh(self, resident: Resident) -> LogitsProcessor:
        """A processor that is told of these requests only, and only now."""
        processor = self.make()
        processor.update_state(BatchDelta(added=[request.added(row) for row, request in resident.items()]))
        return processor

    def crowd(self, count: int = ROWS, output: int = 3) -> Resident:
        return {row: self.request(row, output + row) for row in range(count)}

    def history(self, *processors: LogitsProcessor, steps: int = 25) -> Iterator[Resident]:
        """Requests come, grow, move and go; each processor is told. Yields the batch of every step."""
        draw = random.Random(0)
        resident: Resident = {}
        for step in range(steps):
            removed = [row for row in resident if draw.random() < 0.15]
            resident = {row: request for row, request in resident.items() if row not in removed}
            free = [row for row in range(ROWS) if row not in resident]
            moved = [(row, free.pop()) for row in list(resident)[:1] if free and draw.random() < 0.2]
            for source, target in moved:
                resident[target] = resident.pop(source)
            fresh = {row: self.request(10 * step + row, draw.choice((0, 0, 4))) for row in free if draw.random() < 0.4}
            resident |= fresh
            added = [request.added(row) for row, request in fresh.items()]
            delta = BatchDelta(removed, moved, added) if removed or moved or added else None
            for processor in processors:
                processor.update_state(delta)
            yield resident
            for request in resident.values():
                self.grow(request)

    # tests ----------------------------------------------------------------------------------------------------------

    def test_it_accepts_its_requests_and_acts_on_some(self) -> None:
        resident = self.crowd()
        for request in resident.values():
            type(self.make()).validate_params(request.params)
        found = self.look(self.fresh(resident), resident)
        assert any(not torch.equal(found[row], self.logits(request)) for row, request in resident.items()), (
            "params() and ext() should give requests that the processor acts on"
        )

    def test_state_follows_from_the_deltas_alone(self) -> None:
        """One that applies in every step, one that only listens, and one that is told of the present batch at once."""
        busy, idle = self.make(), self.make()
        resident: Resident = {}
        for resident in self.history(busy, idle):
            same(self.look(busy, resident), self.look(self.fresh(resident), resident))
        same(self.look(idle, resident), self.look(busy, resident))

    def test_a_step_without_changes_changes_nothing(self) -> None:
        resident = self.crowd()
        processor = self.fresh(resident)
        before = self.look(processor, resident)
        for _ in range(3):
            processor.update_state(None)
        same(self.look(processor, resident), before)

    def test_looking_twice_gives_the_same(self) -> None:
        resident = self.crowd()
        processor = self.fresh(resident)
        same(self.look(processor, resident), self.look(processor, resident))

    def test_rows_are_independent(self) -> None:
        resident = self.crowd()
        processor = self.fresh(resident)
        together = self.look(processor, resident)
        for row, request in resident.items():
            one = {row: request}
            same(self.look(processor, one), {row: together[row]})
            same(self.look(self.fresh(one), one), {row: together[row]})
            elsewhere = {ROWS - 1 - row: request}
            same(self.look(self.fresh(elsewhere), elsewhere), {ROWS - 1 - row: together[row]})

    def test_the_order_of_rows_does_not_matter(self) -> None:
        resident = self.crowd()
        shuffled = dict(random.Random(1).sample(list(resident.items()), ROWS))
        assert list(shuffled) != list(resident)
        expected = self.look(self.fresh(resident), resident)
        same(self.look(self.fresh(resident), shuffled), expected)
        same(self.look(self.fresh(shuffled), resident), expected)

    def test_concerns_no_row_when_asked_about_none(self) -> None:
        assert list(self.fresh(self.crowd()).concerns([])) == []

    def test_the_output_is_read_when_it_is_needed(self) -> None:
        resident = self.crowd(output=0)
        processor = self.fresh(resident)
        for _ in range(6):
            same(self.look(processor, resident), self.look(self.fresh(resident), resident))
            for request in resident.values():
                self.grow(request)
            processor.update_state(None)

    def test_a_request_that_comes_back_goes_on_as_if_it_had_stayed(self) -> None:
        resident = self.crowd(output=2)
        stayed, left = self.fresh(resident), self.fresh(resident)
        for row, request in resident.items():
            self.look(left, {row: request})
            left.update_state(BatchDelta(removed=[row]))
            left.update_state(BatchDelta(added=[request.added(row)]))
        same(self.look(left, resident), self.look(stayed, resident))

    def test_a_row_that_is_used_again_keeps_nothing(self) -> None:
        old = self.crowd()
        processor = self.fresh(old)
        self.look(processor, old)
        new = {row: self.request(100 + row, row % 3) for row in old}
        processor.update_state(BatchDelta(removed=list(old), added=[request.added(row) for row, request in new.items()]))
        same(self.look(processor, new), self.look(self.fresh(new), new))

    def test_rows_that_move_take_their_state_along(self) -> None:
        resident = self.crowd(count=3)
        processor = self.fresh(resident)
        before = self.look(processor, resident)
        processor.update_state(BatchDelta(moved=[(2, 5), (0, 2)]))
        after = {5: resident[2], 2: resident[0], 1: resident[1]}
        same(self.look(processor, after), {5: before[2], 2: before[0], 1: before[1]})

    def test_the_highest_logit_stays_if_that_is_claimed(self) -> None:
        processor = self.make()
        if not processor.argmax_invariant:
            pytest.skip("not claimed")
        for resident in self.history(processor):
            for row, after in self.look(processor, resident).items():
                assert int(after.argmax()) == int(self.logits(resident[row]).argmax()), f"row {row}"


def same(got: dict[int, torch.Tensor], wanted: dict[int, torch.Tensor]) -> None:
    """Equal, but for how a sum over a row is rounded."""
    assert got.keys() == wanted.keys()
    for row, logits in wanted.items():
        assert torch.allclose(got[row], logits, rtol=1e-5, atol=1e-6, equal_nan=True), f"row {row} differs"
