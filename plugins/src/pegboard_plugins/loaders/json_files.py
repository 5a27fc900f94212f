"""JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pegboard.contracts.model_source import ModelNotFound


def read_object(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """The object in ``path``; ``missing``, if given, where there is no such file. Raises ``ModelNotFound`` naming the file."""
    if missing is not None and not path.exists():
        return missing
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelNotFound(f"{path}: holds a {type(found).__name__}, expected an object")
    return found
