"""GGUFLoader: the tensors of a GGUF file under Hugging Face's names, dequantised when read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pegboard.contracts.model_source import ModelSource
from pegboard.contracts.weight_loader import WeightHandle, WeightLoader, WeightsError
from pegboard_plugins.loaders.gguf_metadata import GGUFFile, TensorInfo, read_gguf
from pegboard_plugins.loaders.gguf_names import NOT_WEIGHTS, added_to, hf_name, row_order

_STORED: dict[GGMLQuantizationType, tuple[torch.dtype, type[np.generic]]] = {
    GGMLQuantizationType.F32: (torch.float32, np.float32),
    GGMLQuantizationType.F16: (torch.float16, np.float16),
    GGMLQuantizationType.BF16: (torch.bfloat16, np.int16),
    GGMLQuantizationType.F64: (torch.float64, np.float64),
}
"""Types that hold values, not blocks, as torch types and as what numpy moves them about as. The work is done in numpy: threads of
torch for copies of this size cost more than they save."""
_DEQUANTISED = (torch.float32, np.float32)
_CHUNK_BYTES = 2 << 20
"""Most bytes read from the file at once: what a tensor needs beyond its own result."""
_RUN_BLOCKS = 128
"""Quantisation blocks given to the dequantiser as one row: it works on 16 rows at a time, fastest while they fit in cache."""


class GGUFLoader(WeightLoader):
    """Opens one GGUF file. Reads with plain file reads, not a mapping: what was read does not stay resident."""

    def open(self, source: ModelSource, spec: Any = None) -> AbstractContextManager[Mapping[str, WeightHandle]]:
        """Handles of all tensors, dequantised to float32 or in the stored float type. Raises ``WeightsError`` naming the file."""
        file = read_gguf(source.path)
        _check_types(file)
        return _opened(file)


@contextmanager
def _opened(file: GGUFFile) -> Iterator[Mapping[str, WeightHandle]]:
    try:
        stream = open(file.path, "rb", buffering=0)  # noqa: SIM115 - closed below, after the caller's block
    except OSError as error:
        raise WeightsError(f"{file.path}: cannot be read: {error.strerror}") from error
    with stream:
        reader = _Reader(file.path, stream)
        handles = (_handle(file, name, reader) for name in file.tensors if name not in NOT_WEIGHTS)
        yield {handle.name: handle for handle in handles}


def _handle(file: GGUFFile, name: str, reader: _Reader) -> GGUFHandle:
    info, architecture = file.tensors[name], file.architecture
    order = row_order(name, info.shape[0], file.metadata)
    return GGUFHandle(hf_name(name, architecture), info, reader, order, added_to(name, architecture))


def _check_types(file: GGUFFile) -> None:
    """Refuse types that the gguf package can name but not dequantise, before anything is read."""
    for kind in {info.type for info in file.tensors.values()} - set(_STORED):
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as error:
            name = next(name for name, info in file.tensors.items() if info.type is kind)
            raise WeightsError(
                f"{file.path}: tensor {name!r} has the type {kind.name}, which the gguf package cannot dequantise; "
                "convert the model to another type, such as Q8_0"
            ) from error


class _Reader:
    """Reads of byte ranges, from any thread."""

    def __init__(self, path: str, stream: BinaryIO) -> None:
        self.path = path
        self._stream = stream
        self._lock = threading.Lock()

    def read(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """``length`` bytes in writable memory. Raises ``WeightsError`` if the file has become shorter."""
        data = np.empty(length, np.uint8)
        view, done = data.data, 0
        with self._lock:
            if self._stream.closed:
                raise ValueError(f"{self.path}: read after the loader's context was left")
            self._stream.seek(offset)
            while done < length:
                count = self._stream.readinto(view[done:])  # type: ignore[attr-defined]
                if not count:
                    raise WeightsError(f"{self.path}: truncated while being read: nothing at byte {offset + done}")
                done += count
        return data


class GGUFHandle:
    """One tensor. ``dtype`` is what ``read`` gives: the stored float type, or float32 for quantised tensors. ``added``: what the
    stored values are larger by than those that ``read`` gives."""

    def __init__(self, name: str, info: TensorInfo, reader: _Reader, order: npt.NDArray[np.int64] | None, added: int = 0) -> None:
        self.name = name
        self.shape = info.shape
        self._torch_dtype, self._numpy_dtype = _STORED.get(info.type, _DEQUANTISED)
        self.dtype = str(self._torch_dtype).removeprefix("torch.")
        self._info = info
        self._reader = reader
        self._order = order
        self._added = added
        self._rows = prod(info.shape[:-1])
        self._columns = info.shape[-1]

    def read(self) -> torch.Tensor:
        """The whole tensor, in memory of its own."""
        return self._tensor(self._read_all())

    def read_slice(self, dim: int, start: int, length: int) -> torch.Tensor:
        """Part of it along ``dim``. Along the first only those rows are read; along the last, all rows, to keep their columns."""
        dim = dim % len(self.shape) if -len(self.shape) <= dim < len(self.shape) else -1
        if dim < 0 or start < 0 or length < 0 or start + length > self.shape[dim]:
            raise ValueError(f"{self.name} of shape {self.shape} has no slice of {length} from {start} along dimension {dim}")
        if length == 0:
            return torch.empty([0 if i == dim else n for i, n in enumerate(self.shape)], dtype=self._torch_dtype)
        if dim == 0 and len(self.shape) > 1:
            return self._tensor(self._read_first(start, length))
        if dim == len(self.shape) - 1 and self._order is None:
            data = self._read_rows(0, self._rows, slice(start, start + length))
            return self._tensor(data.reshape(*self.shape[:-1], length))
        index = [slice(None)] * dim + [slice(start, start + length)]
        return self._tensor(self._read_all()[tuple(index)].copy())

    def _tensor(self, data: npt.NDArray[Any]) -> torch.Tensor:
        values = torch.from_numpy(data).view(self._torch_dtype)
        return values.sub_(self._added) if self._added else values

    def _read_all(self) -> npt.NDArray[Any]:
        data = self._read_rows(0, self._rows, slice(None)).reshape(self.shape)
        return data if self._order is None else data[self._order]

    def _read_first(self, start: int, length: int) -> npt.NDArray[Any]:
        """Items ``start`` … of the first dimension. Reordering stays inside a head, so at most a head too much is read."""
        inner = self._rows // self.shape[0]
        if self._order is None:
            return self._read_rows(start * inner, length * inner, slice(None)).reshape(length, *self.shape[1:])
        wanted = self._order[start : start + length]
        first, last = int(wanted.min()), int(wanted.max())
        found = self._read_rows(first * inner, (last + 1 - first) * inner, slice(None))
        return found.reshape(-1, *self.shape[1:])[wanted - first]

    def _read_rows(self, first: int, count: int, columns: slice) -> npt.NDArray[Any]:
        """Rows of the file's own order as a (count, columns) array, a few megabytes at a time. Rows are read as a whole, because
        a part of one is smaller than what a disk reads at once; of quantised ones only the blocks of wanted columns are used."""
        begin, end, _ = columns.indices(self._columns)
        values, size = GGML_QUANT_SIZES[self._info.type]
        low, high = begin // values, -(-end // values)
        result = np.empty((count, end - begin), self._numpy_dtype)
        row_bytes = self._info.row_bytes
        step = max(1, _CHUNK_BYTES // row_bytes)
        for start in range(0, count, step):
            rows = min(step, count - start)
            raw = self._reader.read(self._info.offset + (first + start) * row_bytes, rows * row_bytes)
            blocks = raw.reshape(rows, row_bytes)[:, low * size : high * size]
            plain = self._info.type in _STORED
            found = blocks.view(self._numpy_dtype) if plain else _dequantise(np.ascontiguousarray(blocks), self._info.type)
            result[start : start + rows] = found.reshape(rows, -1)[:, begin - low * values : end - low * values]
        return result


def _dequantise(raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """Bytes of whole blocks as a flat array."""
    raw, size = raw.reshape(-1), GGML_QUANT_SIZES[kind][1]
    even = len(raw) // size // _RUN_BLOCKS * _RUN_BLOCKS * size
    parts = [raw[:even].reshape(-1, _RUN_BLOCKS * size), raw[even:].reshape(1, -1)]
    return np.concatenate([dequantize(part, kind).reshape(-1) for part in parts if part.size])
