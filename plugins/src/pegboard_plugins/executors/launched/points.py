"""Points: what an engine says of the place that it has reached, so that a rank that has come to another one is found out."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from pegboard.contracts.executor import ExecutorFailed
from pegboard.wire import GrammarOutput, ModelRunnerOutput, SchedulerOutput

_encoder: Final = msgspec.msgpack.Encoder(enc_hook=lambda value: repr(type(value)))
_FIELDS: Final = SchedulerOutput.__struct_fields__
_REMEDY: Final = (
    "all ranks must run the same script on the same input, and parts must decide the same on all of them "
    "(docs/executors.md, 'What must be the same')"
)


class DriftError(ExecutorFailed):
    """The engines of the ranks are not at the same point any more. The message says which rank is where, and what differs."""


class Point(NamedTuple):
    """``what``: in words, equal on all ranks. ``sums``: of the contents, by field."""

    what: str
    sums: Mapping[str, int]


def of_plan(plan: SchedulerOutput) -> Point:
    """Takes about ten microseconds for 64 decoding requests."""
    counts = f"{len(plan.slots)} request{'s' * (len(plan.slots) != 1)}, {sum(plan.num_scheduled_tokens)} tokens"
    sums = {name: _sum(value) for name in _FIELDS if (value := getattr(plan, name))}
    return Point(f"step {plan.step_id} ({counts})", sums)


def of_grammar(grammar: GrammarOutput | None) -> Point:
    if grammar is None:
        return Point("the second half of a step, without masks", {})
    masks = {"slots": _sum(grammar.slots), "bitmask": zlib.crc32(grammar.bitmask)}
    return Point(f"the second half of step {grammar.step_id}", masks)


def of_output(output: ModelRunnerOutput | None) -> int:
    """Of what the scheduler goes by."""
    if output is None:
        return 0
    return _sum([output.step_id, output.slots, output.sampled_token_ids, output.errors, output.draft_token_ids])


def drift(points: Mapping[int, Point]) -> DriftError:
    """Of ranks that are at these points, which are not all one."""
    groups: dict[Any, list[int]] = {}
    for rank in sorted(points):
        groups.setdefault((points[rank].what, tuple(sorted(points[rank].sums.items()))), []).append(rank)
    found = [points[ranks[0]] for ranks in groups.values()]
    places = "; ".join(
        f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} at {point.what}"
        for ranks, point in zip(groups.values(), found, strict=True)
    )
    names = dict.fromkeys(name for point in found for name in point.sums)
    comparable = all(point.sums for point in found)
    differing = [name for name in names if comparable and len({point.sums.get(name) for point in found}) > 1]
    what = f"; what differs: {', '.join(differing)}" if differing else ""
    return DriftError(f"the engines have drifted apart: {places}{what}; {_REMEDY}")


def drift_of_outputs(what: str, sums: Mapping[int, int]) -> DriftError:
    """Ranks that computed one thing and got several."""
    return DriftError(
        f"the engines have drifted apart: {what}: {ranks_text(sums)} should have the same tokens, and have not; {_REMEDY}"
    )


def ranks_text(ranks: Any) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def _sum(value: Any) -> int:
    return zlib.crc32(_encoder.encode(value))
