"""Conformance of a WeightLoader. Subclass, give ``make`` and ``write``, and every invariant of the contract is tested."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.contracts.model_source import ModelSource
from pegboard.contracts.weight_loader import WeightLoader, WeightsError


class WeightLoaderConformance(abc.ABC):
    tolerance = 0.0
    """Largest difference between what was written and what is read: 0 unless the format loses precision."""

    @abc.abstractmethod
    def make(self) -> WeightLoader:
        """A new loader."""

    @abc.abstractmethod
    def write(self, folder: Path) -> tuple[ModelSource, Mapping[str, torch.Tensor]]:
        """Write a small checkpoint into ``folder``. Its source, and its tensors by the names that the loader must give."""

    def spec(self, source: ModelSource) -> Any:
        """What is passed to ``open`` as ``spec``."""
        return None

    def files(self, source: ModelSource) -> list[Path]:
        """The files that hold weights: ``source.path``, or everything in it with the suffix .safetensors, .gguf or .bin."""
        path = Path(source.path)
        if path.is_file():
            return [path]
        return sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".gguf", ".bin"))

    def test_names_and_shapes(self, tmp_path: Path) -> None:
        source, tensors = self.write(tmp_path)
        with self.make().open(source, self.spec(source)) as handles:
            assert {name: tuple(h.shape) for name, h in handles.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
            assert all(name == handle.name for name, handle in handles.items())
            assert all(isinstance(handle.dtype, str) for handle in handles.values())

    def test_values(self, tmp_path: Path) -> None:
        source, tensors = self.write(tmp_path)
        with self.make().open(source, self.spec(source)) as handles:
            for name, wanted in tensors.items():
                got = handles[name].read()
                assert got.shape == wanted.shape
                assert float((got.float() - wanted.float()).abs().max()) <= self.tolerance, name

    def test_slices_are_parts_of_the_whole(self, tmp_path: Path) -> None:
        source, _ = self.write(tmp_path)
        with self.make().open(source, self.spec(source)) as handles:
            for handle in handles.values():
                whole = handle.read()
                for dim, size in enumerate(handle.shape):
                    start, length = size // 4, size // 2
                    assert torch.equal(handle.read_slice(dim, start, length), whole.narrow(dim, start, length)), handle.name

    def test_reading_twice_gives_the_same(self, tmp_path: Path) -> None:
        source, _ = self.write(tmp_path)
        with self.make().open(source, self.spec(source)) as handles:
            handle = next(iter(handles.values()))
            assert torch.equal(handle.read().clone(), handle.read())

    @pytest.mark.parametrize("kept", ["all but one byte", "half", "8 bytes", "nothing"])
    def test_a_truncated_file_is_named(self, tmp_path: Path, kept: str) -> None:
        source, _ = self.write(tmp_path)
        last = self.files(source)[-1]
        content = last.read_bytes()
        size = {"all but one byte": len(content) - 1, "half": len(content) // 2, "8 bytes": 8, "nothing": 0}[kept]
        last.write_bytes(content[:size])
        self.assert_refused(source, last)

    def test_something_else_in_its_place_is_named(self, tmp_path: Path) -> None:
        source, _ = self.write(tmp_path)
        last = self.files(source)[-1]
        last.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0123456789abcdef\nsize 123456789\n")
        self.assert_refused(source, last)
        last.write_bytes(bytes(range(256)) * 16)
        self.assert_refused(source, last)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        source, _ = self.write(tmp_path)
        last = self.files(source)[-1]
        last.unlink()
        self.assert_refused(source, last)

    def assert_refused(self, source: ModelSource, file: Path) -> None:
        with pytest.raises(WeightsError) as caught, self.make().open(source, self.spec(source)):
            pass
        assert file.name in str(caught.value)
