"""Random weights: for measuring speed and trying configurations without a checkpoint."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pegboard.config import EngineConfig
from pegboard.contracts.model import ModelSpec
from pegboard.contracts.model_source import ModelSource
from pegboard.contracts.weight_loader import WeightHandle, WeightLoader, WeightsError
from pegboard.plugins import Composition

if TYPE_CHECKING:
    import torch


class DummyHandle:
    """A tensor made when it is read. Values depend on the seed and the tensor's name alone, so that every rank and every
    slice sees the same checkpoint.

    Matrices are normal with standard deviation 1 / sqrt(columns), which keeps the scale of what passes through; norm
    weights are 1 and biases 0.
    """

    dtype = "float32"

    def __init__(self, name: str, shape: tuple[int, ...], seed: int) -> None:
        self.name, self.shape, self.seed = name, shape, seed

    def read(self) -> torch.Tensor:
        import torch

        if len(self.shape) < 2:
            return torch.zeros(self.shape) if self.name.endswith("bias") else torch.ones(self.shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {self.name}".encode()))
        columns = math.prod(self.shape[1:])
        return torch.empty(self.shape).normal_(0.0, columns**-0.5, generator=generator)

    def read_slice(self, dim: int, start: int, length: int) -> torch.Tensor:
        return self.read().narrow(dim, start, length)


class DummyLoader(WeightLoader):
    """Asks the composed model for the names and shapes of its checkpoint; opens no file."""

    def __init__(self, config: EngineConfig, composition: Composition) -> None:
        self.seed = config.seed or 0
        self.model_provider = composition.parts["model"]

    @contextmanager
    def open(self, source: ModelSource, spec: ModelSpec) -> Iterator[Mapping[str, WeightHandle]]:
        model: Any = self.model_provider.load()
        tensors = model.checkpoint_tensors(spec)
        if tensors is None:
            raise WeightsError(
                f"model {self.model_provider.name!r} does not tell its tensors (Model.checkpoint_tensors), so it has no dummy "
                "weights; use another load_format"
            )
        yield {name: DummyHandle(name, shape, self.seed) for name, shape in tensors.items()}
