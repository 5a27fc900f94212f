"""Safetensors files on disk: which belong to a checkpoint, and what their headers say. Needs no torch.

A file is an 8-byte little-endian header length, a JSON header of that length, and the tensors' bytes. Everything is
checked against the size of the file here, because a mapped file that is too short would read as zeros or crash later.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pegboard.contracts.model_source import ModelSource
from pegboard.contracts.weight_loader import WeightsError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
}  # fmt: skip
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
               "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn",
               "F8_E5M2": "float8_e5m2"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a header. ``dtype`` has torch's name where torch has one."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]


def find_files(path: str) -> list[Path]:
    """The safetensors files of a checkpoint: ``path`` itself if it is a file; else those of its index, or model.safetensors,
    or every ``*.safetensors``. Raises ``WeightsError`` naming what is missing."""
    folder = Path(path)
    if not folder.is_dir():
        if not folder.exists():
            raise WeightsError(f"{folder} does not exist")
        return [folder]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if (folder / INDEX).exists():
        return _indexed_files(folder)
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        others = sorted(p.name for p in folder.glob("*.bin"))
        hint = f"; {', '.join(others[:3])} must be converted to safetensors first" if others else ""
        raise WeightsError(f"{folder} holds neither {SINGLE} nor {INDEX} nor any other *.safetensors{hint}")
    return found


def weight_map(index: Path) -> dict[str, str]:
    """Tensor name to file name, as an index says."""
    try:
        found = json.loads(index.read_bytes()).get("weight_map")
    except (ValueError, AttributeError) as e:
        raise WeightsError(f"{index} is corrupt: it is not a JSON object ({e})") from None
    except OSError as e:
        raise WeightsError(f"{index} cannot be read: {e.strerror}") from e
    if not isinstance(found, dict) or not found or not all(isinstance(v, str) for v in found.values()):
        raise WeightsError(f"{index} is corrupt: it has no 'weight_map' of tensor names to file names")
    return found


def _indexed_files(folder: Path) -> list[Path]:
    names = sorted(set(weight_map(folder / INDEX).values()))
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise WeightsError(f"{folder / INDEX} names {name!r}, a file outside its folder")
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise WeightsError(
            f"{folder} lacks {len(missing)} of {len(names)} files that {INDEX} names: {', '.join(missing[:10])}; "
            "download the checkpoint again"
        )
    return [folder / name for name in names]


def read_header(file: Path) -> list[TensorEntry]:
    """The tensors of one file, after checking that its size is what the header claims. Raises ``WeightsError``."""
    try:
        if file.is_dir():
            raise WeightsError(f"{file} is a directory, not a safetensors file")
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(8)
            length = _header_length(file, size, start, opened.read(1024) if start == b"version " else b"")
            header = opened.read(length)
    except OSError as e:
        raise WeightsError(f"{file} cannot be read: {e.strerror or e}") from e
    try:
        parsed = json.loads(header)
    except (ValueError, RecursionError) as e:
        raise WeightsError(f"{file} is corrupt: its header is not JSON ({e})") from None
    if not isinstance(parsed, dict):
        raise WeightsError(f"{file} is corrupt: its header is not a JSON object")
    parsed.pop("__metadata__", None)
    _check_layout(file, parsed, data_bytes=size - 8 - length)
    return [
        TensorEntry(name, file, DTYPE_NAMES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"]))
        for name, entry in parsed.items()
    ]


def _header_length(file: Path, size: int, start: bytes, rest: bytes) -> int:
    if start == b"version " and b"git-lfs" in rest:
        raise WeightsError(f"{file} is a git-lfs pointer of {size} bytes, not the weights; fetch them with 'git lfs pull'")
    if len(start) < 8:
        raise WeightsError(f"{file} is truncated: {size} bytes, where the header length alone takes 8")
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER_BYTES:
        raise WeightsError(f"{file} is corrupt: it claims a header of {length} bytes, more than the {MAX_HEADER_BYTES} allowed")
    if length > size - 8:
        raise WeightsError(
            f"{file} is truncated: its header takes {length} bytes, so the file must have at least {length + 8}, but has {size}"
        )
    return length


def _check_layout(file: Path, header: dict[str, Any], data_bytes: int) -> None:
    """Offsets must match dtype and shape, follow one another without gaps, and end where the file ends."""
    spans = []
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            counts = [*shape, begin, end]
        except (TypeError, KeyError, ValueError):
            raise WeightsError(f"{file} is corrupt: entry {name!r} is {entry!r}, without dtype, shape and two offsets") from None
        if not all(isinstance(n, int) and n >= 0 for n in counts):
            raise WeightsError(f"{file} is corrupt: shape {shape!r} or offsets {begin!r}, {end!r} of {name!r} are no counts")
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise WeightsError(f"{file}: tensor {name!r} has unknown dtype {dtype!r}")
        expected = math.prod(shape) * ITEM_BYTES[dtype]
        if end - begin != expected:
            raise WeightsError(
                f"{file} is corrupt: {name!r}, {dtype} {shape}, must take {expected} bytes, but its offsets span {end - begin}"
            )
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise WeightsError(f"{file} is corrupt: {name!r} starts at byte {begin} of the data, where {position} is expected")
        position = end
    if position != data_bytes:
        word = "truncated" if data_bytes < position else "corrupt"
        raise WeightsError(f"{file} is {word}: its tensors take {position} bytes, but {data_bytes} follow the header")


def stored_dtype(source: ModelSource) -> str | None:
    """The precision that most elements of a safetensors checkpoint have, for configurations that state none; None for other
    formats or if there is no file."""
    path = Path(source.path)
    if source.loader != "safetensors" or not os.path.exists(path):
        return None
    elements: Counter[str] = Counter()
    for file in find_files(source.path):
        for entry in read_header(file):
            if entry.dtype in ("float32", "bfloat16", "float16"):
                elements[entry.dtype] += math.prod(entry.shape)
    return elements.most_common(1)[0][0] if elements else None
