"""Errors of the engine itself."""

from __future__ import annotations

from typing import Any


class EngineDeadError(RuntimeError):
    """The engine has failed for good. ``cause`` is the root cause, also set as ``__cause__``.

    Raised to every caller that waits when it happens, and to every later call. Remedy: make a new engine.
    """

    def __init__(self, cause: BaseException | str) -> None:
        what = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
        super().__init__(f"the engine has failed and takes no more requests ({what}); start a new engine")
        self.cause = cause
        if isinstance(cause, BaseException):
            self.__cause__ = cause

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.cause,)


class EngineStartError(RuntimeError):
    """The engine cannot start with this configuration on this machine; the message names the numbers and the options."""


class RequestFailed(ValueError):
    """A request of a batch was refused; ``index`` is its place in the batch. Nothing of the batch was run."""

    def __init__(self, index: int, reason: BaseException | str) -> None:
        super().__init__(f"prompts[{index}]: {reason}")
        self.index, self._reason = index, str(reason)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.index, self._reason)
