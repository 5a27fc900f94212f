"""ModelSource: where a model comes from, as found by the ``resolve_model`` hook. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class ModelNotFound(ValueError):
    """A model reference that nothing resolves, or that resolves to something unusable. The message says what was tried."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """``ref`` as the user wrote it; ``path`` the folder or file; ``loader`` and ``tokenizer`` name the providers that read it.

    ``config`` is the content of config.json, or its equivalent made from a GGUF's metadata; ``generation_config``
    likewise ({} if there is none). ``tokenizer_path`` defaults to ``path``.
    """

    ref: str
    path: str
    loader: str
    tokenizer: str
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_path: str | None = None
    resolved_by: str = ""
