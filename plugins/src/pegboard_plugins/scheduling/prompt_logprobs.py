"""Prompt logprobs: collected chunk by chunk, reported once, with the first token."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.wire import Logprobs
from pegboard_plugins.scheduling.request import Request


def collect(request: Request, step: int, computed: int, count: int, entries: Sequence[Logprobs]) -> None:
    """Book ``entries`` of a chunk of ``count`` tokens after ``computed``: those of tokens ``computed + 1`` to
    ``computed + count``, as far as they are prompt. A chunk that is computed again brings nothing new. Raises ``RuntimeError``
    where some are missing."""
    have, end = request.num_entries, min(computed + count, request.num_wanted_entries)
    if end <= have:
        return
    if computed > have or len(entries) != end - computed:
        raise RuntimeError(
            f"step {step}: the worker returned {len(entries)} prompt logprobs for request {request.request_id!r}, expected were "
            f"those of tokens {computed + 1} to {end}; {have} are there"
        )
    request.prompt_logprobs += entries[have - computed :]
    request.num_entries = end


def report(request: Request) -> list[Logprobs]:
    """All of them; they are let go."""
    entries, request.prompt_logprobs = request.prompt_logprobs, []
    return entries
