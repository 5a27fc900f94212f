"""The metadata of one architecture in a GGUF file, by key."""

from __future__ import annotations

from typing import Any

from pegboard.contracts.weight_loader import WeightsError
from pegboard_plugins.loaders.gguf_metadata import GGUFFile
from pegboard_plugins.loaders.gguf_names import one_for_all


class GGUFKeys:
    """Keys under the architecture's prefix, with errors that name them."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file = file
        self.architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise WeightsError(self.told(key, "is missing"))
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above zero. A list of equal numbers, one per layer, counts as one."""
        value = one_for_all(self.need(key) if default is None else self.get(key, default))
        if not isinstance(value, int) or value < 1:
            raise WeightsError(self.told(key, f"is {value!r}, not one count for all layers"))
        return value

    def told(self, key: str, problem: str) -> str:
        """A message about a key."""
        return f"{self._file.path}: the metadata key {self.architecture}.{key} {problem}"
