"""The header of a GGUF file: key/value metadata and the table of tensors. Reads no tensor data and imports no torch.

Layout (little-endian): magic "GGUF", u32 version, u64 tensor count, u64 key count; then per key a string name, u32 value type,
value; then per tensor a string name, u32 dimension count, u64 dimensions (fastest first), u32 type, u64 offset; then padding
to ``general.alignment``, from where the offsets count. A string is a u64 length and UTF-8 bytes. The ``gguf`` package's own
reader makes several numpy arrays per string and needs over a second for a vocabulary; tensor types and sizes are its.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from pegboard.contracts.weight_loader import WeightsError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
"""As in ggml: no tensor has more."""
REMOVED_TYPES = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip
"""Type numbers that ggml once gave out and no longer reads."""

_SCALARS = {
    GGUFValueType.UINT8: "B", GGUFValueType.INT8: "b", GGUFValueType.UINT16: "H", GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I", GGUFValueType.INT32: "i", GGUFValueType.FLOAT32: "f", GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q", GGUFValueType.INT64: "q", GGUFValueType.FLOAT64: "d",
}  # fmt: skip
_SMALLEST_KEY = 8 + 4 + 1
_SMALLEST_TENSOR = 8 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. ``shape`` is in torch's order (slowest dimension first), ``offset`` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one run along the last dimension."""
        block, size = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * size


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A parsed header. Values of ``metadata`` are str, int, float, bool or lists of those."""

    path: str
    size: int
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """``general.architecture``. Raises ``WeightsError`` if the file does not say."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str):
            raise WeightsError(f"{self.path}: the metadata has no general.architecture, so the model's kind is unknown")
        return value


_cache: dict[tuple[str, int, int, int], GGUFFile] = {}
_cache_lock = threading.Lock()
_CACHED_FILES = 4


def read_gguf(path: str | Path) -> GGUFFile:
    """Parse a header, or give the one parsed before if the file has not changed since. Thread-safe.

    Raises ``WeightsError`` naming the file for anything that is not a readable, complete GGUF file.
    """
    path = os.path.abspath(path)
    try:
        stat = os.stat(path)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error
    key = (path, stat.st_mtime_ns, stat.st_size, stat.st_ino)
    with _cache_lock:
        found = _cache.get(key)
        if found is None:
            found = _parse(path, stat.st_size)
            while len(_cache) >= _CACHED_FILES:
                del _cache[next(iter(_cache))]
            _cache[key] = found
    return found


def _parse(path: str, size: int) -> GGUFFile:
    if size < 24:
        raise WeightsError(f"{path}: not a GGUF file: {size} bytes are fewer than its 24-byte header")
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return _Header(path, view, size).read()
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error


class _Header:
    """A cursor over the header. Every length is checked against the file's size before anything is allocated for it."""

    def __init__(self, path: str, view: mmap.mmap, size: int) -> None:
        self.path = path
        self.view = view
        self.size = size
        self.pos = 0

    def fail(self, message: str) -> NoReturn:
        raise WeightsError(f"{self.path}: {message}")

    def read(self) -> GGUFFile:
        version, tensor_count, key_count = self.read_start()
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self.string("the name of a metadata key")
            if key in metadata:
                self.fail(f"corrupt: metadata key {key!r} occurs twice")
            metadata[key] = self.value(key, self.scalar("I", key))
        tensors = self.read_tensors(tensor_count, metadata.get("general.alignment", 32))
        return GGUFFile(self.path, self.size, version, metadata, tensors)

    def read_start(self) -> tuple[int, int, int]:
        magic = bytes(self.view[:4])
        if magic != MAGIC:
            if self.view[:40].startswith(b"version https://git-lfs"):
                self.fail("not a GGUF file but a git-lfs pointer; fetch the file itself with 'git lfs pull'")
            self.fail(f"not a GGUF file: it starts with {magic!r} instead of {MAGIC!r}")
        self.pos = 4
        version = self.scalar("I", "version")
        if version not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                self.fail("a big-endian GGUF file; only little-endian ones are supported")
            self.fail(
                f"GGUF version {version} is not supported, only {' and '.join(map(str, VERSIONS))}; convert the model again"
            )
        tensor_count, key_count = self.scalar("Q", "tensor count"), self.scalar("Q", "key count")
        room = self.size - self.pos
        if tensor_count * _SMALLEST_TENSOR + key_count * _SMALLEST_KEY > room:
            self.fail(
                f"corrupt or truncated: the header claims {tensor_count} tensors and {key_count} metadata keys, "
                f"more than the remaining {room} bytes can hold"
            )
        return version, tensor_count, key_count

    def need(self, length: int, what: str) -> None:
        if length > self.size - self.pos:
            self.fail(f"truncated: {what} needs {length} bytes at offset {self.pos}, but the file has {self.size}")

    def scalar(self, code: str, what: str) -> Any:
        length = struct.calcsize("<" + code)
        self.need(length, what)
        (value,) = struct.unpack_from("<" + code, self.view, self.pos)
        self.pos += length
        return value

    def string(self, what: str) -> str:
        length = self.scalar("Q", what)
        self.need(length, what)
        raw = self.view[self.pos : self.pos + length]
        self.pos += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"corrupt: {what} is not UTF-8 ({error.reason} at byte {error.start})")

    def value(self, key: str, number: int) -> Any:
        try:
            kind = GGUFValueType(number)
        except ValueError:
            self.fail(f"corrupt: metadata key {key!r} has the unknown value type {number}")
        if kind is GGUFValueType.STRING:
            return self.string(key)
        if kind is GGUFValueType.ARRAY:
            return self.array(key)
        return self.scalar(_SCALARS[kind], key)

    def array(self, key: str) -> list[Any]:
        number, count = self.scalar("I", key), self.scalar("Q", key)
        if number == GGUFValueType.STRING:
            return self.strings(key, count)
        code = next((code for kind, code in _SCALARS.items() if kind == number), None)
        if code is None:
            self.fail(f"metadata key {key!r} is an array of value type {number}, which is not supported")
        length = struct.calcsize("<" + code) * count
        self.need(length, key)
        values = list(struct.unpack_from(f"<{count}{code}", self.view, self.pos))
        self.pos += length
        return values

    def strings(self, key: str, count: int) -> list[str]:
        """As ``string`` in a loop, with what is looked up per string kept local: vocabularies have 100 000 and more."""
        self.need(8 * count, key)
        view, size, pos = self.view, self.size, self.pos
        length_at = struct.Struct("<Q").unpack_from
        found = []
        try:
            for _ in range(count):
                end = pos + 8 + length_at(view, pos)[0]
                if end > size:
                    self.fail(f"truncated: metadata key {key!r} ends at byte {end}, but the file has {size}")
                found.append(str(view[pos + 8 : end], "utf-8"))
                pos = end
        except struct.error:
            self.fail(f"truncated: metadata key {key!r} runs past the file's {size} bytes")
        except UnicodeDecodeError as error:
            self.fail(f"corrupt: item {len(found)} of metadata key {key!r} is not UTF-8 ({error.reason})")
        self.pos = pos
        return found

    def read_tensors(self, count: int, alignment: Any) -> dict[str, TensorInfo]:
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self.fail(f"corrupt: general.alignment is {alignment!r}, not a power of two")
        entries = [self.tensor_entry() for _ in range(count)]
        start = (self.pos + alignment - 1) // alignment * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                self.fail(f"corrupt: tensor {name!r} occurs twice")
            info = TensorInfo(name, shape, kind, start + offset, self.tensor_bytes(name, shape, kind))
            if info.offset + info.nbytes > self.size:
                self.fail(
                    f"truncated: tensor {name!r} ends at byte {info.offset + info.nbytes}, but the file has {self.size}; "
                    "fetch it again"
                )
            tensors[name] = info
        return tensors

    def tensor_entry(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self.string("the name of a tensor")
        dims = self.scalar("I", name)
        if not 1 <= dims <= MAX_DIMENSIONS:
            self.fail(f"corrupt: tensor {name!r} has {dims} dimensions, not 1 to {MAX_DIMENSIONS}")
        shape = tuple(self.scalar("Q", name) for _ in range(dims))[::-1]
        number, offset = self.scalar("I", name), self.scalar("Q", name)
        try:
            return name, shape, GGMLQuantizationType(number), offset
        except ValueError:
            known = f"{REMOVED_TYPES[number]} (number {number}), which GGUF no longer has" if number in REMOVED_TYPES else (
                f"number {number}, which this version of the gguf package does not know"
            )  # fmt: skip
            self.fail(f"tensor {name!r} has the type {known}; convert the model to another type, such as Q8_0")

    def tensor_bytes(self, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
        block, size = GGML_QUANT_SIZES[kind]
        if 0 in shape:
            self.fail(f"corrupt: tensor {name!r} has the shape {shape}")
        if shape[-1] % block:
            self.fail(
                f"corrupt: tensor {name!r} of type {kind.name} has rows of {shape[-1]}, not a multiple of its {block}-blocks"
            )
        return prod(shape) // block * size
