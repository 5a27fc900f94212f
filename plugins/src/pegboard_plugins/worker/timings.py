"""Where the time of steps goes, when asked."""

from __future__ import annotations

import time


class StepTimings:
    """Seconds per stage, summed over the steps since it was switched on. Off, it costs next to nothing.

    Stages: ``prepare`` (deltas, input tensors), ``metadata`` (the attention backend's plan, unless a graph is replayed),
    ``receive`` (waiting for the pipeline stage before), ``forward`` (model and logits), ``sample`` (tokens, and log probabilities
    of prompts), ``finish`` (making the output).
    """

    STAGES = ("prepare", "metadata", "receive", "forward", "sample", "finish")

    def __init__(self) -> None:
        self.enabled = False
        self._last = 0.0
        self._clear()

    def start(self) -> None:
        if self.enabled:
            self._last = time.perf_counter()

    def mark(self, stage: str) -> None:
        """The time since ``start`` or the last ``mark`` was spent in ``stage``."""
        if self.enabled:
            now = time.perf_counter()
            self._sums[stage] += now - self._last
            self._last = now

    def count(self, rows: int, tokens: int) -> None:
        if self.enabled:
            self._counts["steps"] += 1
            self._counts["rows"] += rows
            self._counts["tokens"] += tokens

    def switch(self, enabled: bool) -> dict[str, float]:
        """The sums so far, with ``steps``, ``rows`` and ``tokens``; then start anew, or stop."""
        found = {**self._sums, **self._counts}
        self.enabled = enabled
        self._clear()
        return found

    def _clear(self) -> None:
        self._sums = dict.fromkeys(self.STAGES, 0.0)
        self._counts = dict.fromkeys(("steps", "rows", "tokens"), 0)
