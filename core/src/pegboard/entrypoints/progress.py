"""Progress bar of a batch, with token rates."""

from __future__ import annotations

import sys
import time
from typing import Any

from pegboard.engine.outputs import RequestOutput


class Progress:
    """A context manager around ``tqdm`` on stderr. Rates are tokens of finished prompts over the time since the start."""

    def __init__(self, total: int, show: bool | None) -> None:
        """``show`` None: only on a terminal."""
        self._total = total
        self._show = sys.stderr.isatty() if show is None else show
        self._bar: Any = None
        self._input = self._output = 0
        self._started = time.monotonic()

    def __enter__(self) -> Progress:
        if self._show:
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, desc="Prompts", unit="prompt", dynamic_ncols=True, file=sys.stderr)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, output: RequestOutput) -> None:
        """One prompt has ended."""
        self._input += len(output.prompt_token_ids)
        self._output += sum(len(o.token_ids) for o in output.outputs)
        if self._bar is not None:
            seconds = max(time.monotonic() - self._started, 1e-9)
            rates = f"input {self._input / seconds:.1f} tok/s, output {self._output / seconds:.1f} tok/s"
            self._bar.set_postfix_str(rates, refresh=False)
            self._bar.update(1)
