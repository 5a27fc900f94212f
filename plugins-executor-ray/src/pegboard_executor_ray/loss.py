"""How an actor has ended, as far as Ray tells."""

from __future__ import annotations

import re
from typing import Final

from ray import exceptions

_LONGEST: Final = 600
_NOT_IMPORTED: Final = "failed to import on the worker"
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


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
