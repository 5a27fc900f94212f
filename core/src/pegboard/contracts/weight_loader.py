"""WeightLoader: a file format. Gives access to named tensors without reading more than is asked for."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import torch

    from pegboard.contracts.model_source import ModelSource

API: Final = 1


class WeightsError(ValueError):
    """Weight files that cannot be used: truncated, corrupt, missing, or tensors that do not match the model.
    The message names file or tensors, what was expected and what was found."""


class WeightHandle(Protocol):
    """One tensor of a checkpoint, not read yet."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> torch.Tensor:
        """The tensor, dequantised, in its stored (or, for quantised types, float32) precision. May be a view of mapped memory:
        copy before writing."""
        ...

    def read_slice(self, dim: int, start: int, length: int) -> torch.Tensor:
        """Part of it along ``dim``, reading no more than that part where the format allows."""
        ...


class WeightLoader(abc.ABC):
    """Opens the weights of a ``ModelSource``.

    Invariants: names are those of Hugging Face checkpoints (a format with other names translates); opening checks every
    file's header against its size before any tensor is read, and allocates nothing in proportion to what a header claims.
    """

    @abc.abstractmethod
    def open(self, source: ModelSource, spec: Any) -> AbstractContextManager[Mapping[str, WeightHandle]]:
        """Handles of all tensors, valid inside the context. ``spec`` is the ``ModelSpec``.
        Raises ``WeightsError`` naming the file."""
