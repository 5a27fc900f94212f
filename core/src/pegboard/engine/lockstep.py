"""Lockstep: what engines that share their ranks agree on, so that all of them plan the same steps.

A launcher may start each rank with an engine of its own (``Executor.num_engines``). Whatever depends on clocks, entropy or the
speed of a machine is then decided once, and whatever callers ask for is compared. A single engine agrees with itself at once.
"""

from __future__ import annotations

import secrets
import time
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from pegboard.contracts.executor import Executor
from pegboard.wire import EngineCoreRequest

_encoder: Final = msgspec.msgpack.Encoder()


class Lockstep:
    """Every method is called by all engines at the same point, and raises ``ExecutorFailed`` where one of them is at another."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.alone: Final = executor.num_engines == 1
        self._now: float | None = None

    def seed(self, configured: int | None) -> int | None:
        """From which requests without a seed get theirs: one that nobody knows beforehand where none is configured; None for an
        engine that is alone, which needs none in common."""
        if configured is not None or self.alone:
            return configured
        return int(self._executor.gather("the draw of a seed", secrets.randbits(63))[0])

    def admit(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """``request`` as all engines have it: with the arrival time that the first one noted."""
        if self.alone:
            return request
        arrivals = self._executor.gather(f"adding {_described(request)}", request.arrival_time)
        return msgspec.structs.replace(request, arrival_time=arrivals[0])

    def abort(self, request_ids: Iterable[str] | None) -> None:
        if not self.alone:
            ids = "all requests" if request_ids is None else f"the requests {', '.join(request_ids)}"
            self._executor.gather(f"aborting {ids:.1000}", None)

    def outcomes(self, known: Mapping[str, str | None]) -> Mapping[str, str | None]:
        """Of grammars' compiles, by request: None, or why it failed. What any engine knows to have failed has failed; a grammar
        is ready when every engine has it."""
        if self.alone:
            return known
        told: list[Mapping[str, str | None]] = self._executor.gather("the news of grammars", known)
        failed = {name: error for one in reversed(told) for name, error in one.items() if error is not None}
        ready = {name: None for name in told[0] if name not in failed and all(name in one for one in told)}
        return failed | ready

    def begin_step(self) -> None:
        """Time may go on."""
        self._now = None

    def clock(self) -> float:
        """``time.time()`` for decisions: of the first engine, asked for once a step at most."""
        if self.alone:
            return time.time()
        if self._now is None:
            self._now = float(self._executor.gather("a look at the clock", time.time())[0])
        return self._now


def _described(request: EngineCoreRequest) -> str:
    """What engines compare of a request, in words and sums: all but the time at which it came."""
    prompt = zlib.crc32(_encoder.encode(request.prompt_token_ids))
    rest = _sum(request)
    return (
        f"request {request.request_id!r:.200} with {len(request.prompt_token_ids)} prompt tokens (sum {prompt:08x}) and "
        f"max_tokens={request.max_tokens} (parameters' sum {rest:08x})"
    )


def _sum(request: EngineCoreRequest) -> int:
    fields: dict[str, Any] = {name: getattr(request, name) for name in request.__struct_fields__}
    for apart in ("prompt_token_ids", "arrival_time"):
        del fields[apart]
    return zlib.crc32(_encoder.encode(fields))
