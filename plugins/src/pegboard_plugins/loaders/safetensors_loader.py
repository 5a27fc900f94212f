"""Safetensors: single files and sharded checkpoints, memory-mapped, each tensor read when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard.contracts.model_source import ModelSource
from pegboard.contracts.weight_loader import WeightHandle, WeightLoader, WeightsError
from pegboard_plugins.loaders.safetensors_files import INDEX, TensorEntry, find_files, read_header, weight_map

if TYPE_CHECKING:
    import torch


class SafetensorsHandle:
    """One tensor of an open file. ``read`` is a view of the mapping: pages are read when the values are used."""

    def __init__(self, entry: TensorEntry, opened: Any) -> None:
        self.name, self.shape, self.dtype = entry.name, entry.shape, entry.dtype
        self._opened = opened

    def read(self) -> torch.Tensor:
        return self._opened.get_tensor(self.name)  # type: ignore[no-any-return]

    def read_slice(self, dim: int, start: int, length: int) -> torch.Tensor:
        index = (slice(None),) * dim + (slice(start, start + length),)
        return self._opened.get_slice(self.name)[index]  # type: ignore[no-any-return]


class SafetensorsLoader(WeightLoader):
    """Opens a folder (see ``find_files`` for which files) or a single file."""

    @contextmanager
    def open(self, source: ModelSource, spec: Any) -> Iterator[Mapping[str, WeightHandle]]:
        entries = check_checkpoint(source.path)
        from safetensors import SafetensorError, safe_open

        with ExitStack() as stack:
            opened = {}
            for file in dict.fromkeys(entry.file for entry in entries.values()):
                try:
                    opened[file] = stack.enter_context(safe_open(file, framework="pt"))
                except (OSError, SafetensorError) as e:
                    raise WeightsError(f"{file} cannot be opened: {e}") from e
            yield {name: SafetensorsHandle(entry, opened[entry.file]) for name, entry in entries.items()}


def check_checkpoint(path: str) -> dict[str, TensorEntry]:
    """Every tensor of a checkpoint by name, after checking all headers, and that each tensor is where the index says and in
    one file only. Raises ``WeightsError`` naming the file."""
    entries: dict[str, TensorEntry] = {}
    for file in find_files(path):
        for entry in read_header(file):
            if entry.name in entries:
                raise WeightsError(f"{entry.name!r} is both in {entries[entry.name].file} and in {file.name}")
            entries[entry.name] = entry
    index = Path(path) / INDEX
    if index.exists() and any(entry.file.name != "model.safetensors" for entry in entries.values()):
        absent = [f"{name} ({file})" for name, file in weight_map(index).items() if not _is_in(entries, name, Path(path) / file)]
        if absent:
            raise WeightsError(
                f"{index} names {len(absent)} tensors that are not in the file it gives for them: {', '.join(absent[:10])}"
            )
    return entries


def _is_in(entries: Mapping[str, TensorEntry], name: str, file: Path) -> bool:
    return name in entries and entries[name].file == file
