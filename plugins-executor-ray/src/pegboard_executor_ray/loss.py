"""How an actor has ended, as far as Ray tells."""

from __future__ import annotations

import os
import re
from types import TracebackType
from typing import Final

import ray
from ray import exceptions

_LONGEST: Final = 600
_NOT_IMPORTED: Final = "failed to import on the worker"
_RAYS_FILES: Final = (os.path.dirname(os.path.abspath(ray.__file__)) + os.sep, "python/ray/")
"""The latter is where its compiled code says that it comes from."""
_ERROR_LINE: Final = re.compile(r"^\w*(?:Error|Exception)\b.*$", re.MULTILINE)


def how_it_ended(error: BaseException) -> str:
    """``error``: what waiting for one of its methods has raised. One line, without what is the same in every such message."""
    _, not_imported, traceback = str(error).partition(_NOT_IMPORTED)
    if not_imported and (line := _ERROR_LINE.search(traceback)):
        return f"cannot import what a rank needs: {_short(line[0])}"
    text = " ".join(str(error).split())
    if isinstance(error, exceptions.ActorUnavailableError):
        return f"cannot be reached any more ({_short(text.rpartition('unavailable: ')[2].partition(' The task may')[0])})"
    for sign in ("Worker exit detail: ", "The actor is dead because "):
        _, found, rest = text.partition(sign)
        if found:
            return f"has ended: {_short(re.split(r' Some common causes include:| The actor never ran| Please see', rest)[0])}"
    return f"has ended ({_short(text)})"


def remedy(error: BaseException) -> str:
    """What to do about an actor that could not start, or nothing."""
    if _NOT_IMPORTED in str(error):
        return "; every node needs the packages that the engine's process has (or plugins.executor_ray.runtime_env brings them)"
    return ""


def raised_by_ray(error: BaseException) -> bool:
    """Whether ``error`` comes out of Ray's own code: ``ray.shutdown`` in one thread makes calls in others fail of whatever comes
    first, ``SystemExit`` among it, which would end a program without a word."""
    step: TracebackType | None = error.__traceback__
    if step is None:
        return False
    while step.tb_next is not None:
        step = step.tb_next
    return step.tb_frame.f_code.co_filename.startswith(_RAYS_FILES)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
