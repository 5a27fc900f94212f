"""Policies that misbehave: they raise, lie and return nonsense, by a seeded draw per call. None may cost a request."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from pegboard.contracts.admission_policy import AdmissionPolicy, Admit, Hold, Skip
from pegboard.contracts.chunk_policy import ChunkPolicy
from pegboard.contracts.event_sink import Event, EventSink
from pegboard.contracts.preemption_policy import BlockNeed, PreemptionPolicy
from pegboard.contracts.request_queue import KeyedRequestQueue
from pegboard.contracts.views import RequestView, SchedulingView

_NONSENSE: tuple[Any, ...] = (object(), "r0", -1, 3.5, [None], {"r0": 1}, b"", True)


class Erratic:
    """``draw`` gives one of ``choices`` or nonsense, or raises."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def draw(self, *choices: Callable[[], Any]) -> Any:
        kind = self.random.randrange(4)
        if kind == 0:
            raise self.random.choice((RuntimeError, KeyError, ZeroDivisionError))("an erratic policy")
        if kind == 1:
            return self.random.choice(_NONSENSE)
        return self.random.choice(choices)()


class ErraticAdmission(Erratic, AdmissionPolicy):
    def admit(self, request: RequestView, context: SchedulingView) -> Any:
        return self.draw(
            lambda: None,
            lambda: Hold("no"),
            lambda: Skip("no"),
            lambda: Admit(max_tokens=self.random.choice((None, 0, 1, 5)), reserve_blocks=self.random.choice((0, 1, 10**6))),
            lambda: Admit(max_tokens=-3),
            lambda: Admit(reserve_blocks="many"),  # type: ignore[arg-type]
        )


class ErraticChunking(Erratic, ChunkPolicy):
    def chunk_tokens(self, request: RequestView, remaining: int, context: SchedulingView) -> Any:
        return self.draw(lambda: None, lambda: 0, lambda: 1, lambda: remaining, lambda: 10**9, lambda: -5)


class ErraticPreemption(Erratic, PreemptionPolicy):
    def victims(self, need: BlockNeed, candidates: Sequence[RequestView], context: SchedulingView) -> Any:
        ids = [c.request_id for c in candidates]
        return self.draw(
            lambda: None,
            list,
            lambda: self.random.sample(ids, len(ids)),
            lambda: [*ids, *ids, "nobody"],
            lambda: iter(ids),
            lambda: [need.requester],
            lambda: [[], ids],
        )

    def mode(self, request: RequestView) -> Any:
        return self.draw(lambda: None, lambda: "recompute", lambda: "swap")

    def proactive(self, candidates: Sequence[RequestView], context: SchedulingView) -> Any:
        if self.random.randrange(4):
            return ()
        return self.draw(tuple, lambda: [self.random.choice(candidates).request_id], lambda: ["nobody"])


class Preempts(PreemptionPolicy):
    """Preempts the running request that ``victim`` names, once."""

    victim: str | None = None

    def victims(self, need: BlockNeed, candidates: Sequence[RequestView], context: SchedulingView) -> Sequence[str]:
        return ()

    def proactive(self, candidates: Sequence[RequestView], context: SchedulingView) -> Sequence[str]:
        if self.victim not in [c.request_id for c in candidates]:
            return ()
        victim, self.victim = self.victim, None
        return (victim,)


class ErraticQueue(Erratic, KeyedRequestQueue):
    """Loses requests, shows others than it returns, and raises; now and then."""

    def __init__(self, seed: int) -> None:
        Erratic.__init__(self, seed)
        KeyedRequestQueue.__init__(self)

    def key(self, request: RequestView) -> int:
        return -request.num_prompt_tokens

    def _misbehave(self) -> bool:
        return self.random.randrange(8) == 0

    def add(self, request: RequestView) -> None:
        if self._misbehave():
            raise RuntimeError("an erratic queue")
        if not self._misbehave():
            super().add(request)

    def peek(self) -> Any:
        return self.draw(super().peek, lambda: None) if self._misbehave() else super().peek()

    def pop(self) -> Any:
        return self.draw(super().pop, lambda: RequestView("nobody", 0.0)) if self._misbehave() else super().pop()

    def remove(self, request_id: str) -> Any:
        return self.draw(lambda: None) if self._misbehave() else super().remove(request_id)


class RaisingSink(EventSink):
    """Counts how often it was called, and raises every time."""

    def __init__(self) -> None:
        self.calls = 0

    def emit(self, event: Event) -> None:
        self.calls += 1
        raise RuntimeError("a sink that raises")
