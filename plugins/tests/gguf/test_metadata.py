"""Headers of GGUF files: what is read, and that every defect is named with its file before anything large happens."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import pytest

from pegboard.contracts.weight_loader import WeightsError
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.gguf_files import write_gguf
from pegboard_plugins.loaders import gguf_metadata
from pegboard_plugins.loaders.gguf_metadata import read_gguf


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(*, version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ARCHITECTURE = key("general.architecture", 8, text("llama"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    make_checkpoint(folder / "checkpoint", num_layers=1)
    return write_gguf(folder / "checkpoint", folder / "small.gguf", "Q8_0")


def test_it_reads_what_the_gguf_package_reads(small: Path) -> None:
    ours, theirs = read_gguf(small), gguf.GGUFReader(small)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert dict(ours.metadata) == fields
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for found in theirs.tensors:
        info = ours.tensors[found.name]
        expected = (tuple(found.shape[::-1].tolist()), found.tensor_type, found.data_offset, found.n_bytes)
        assert (info.shape, info.type, info.offset, info.nbytes) == expected


def test_every_value_type_is_read(tmp_path: Path) -> None:
    scalars = {0: ("B", 200), 1: ("b", -5), 2: ("H", 65535), 3: ("h", -9), 4: ("I", 2**32 - 1), 5: ("i", -7), 6: ("f", 1.5),
               7: ("?", True), 10: ("Q", 2**63), 11: ("q", -(2**62)), 12: ("d", 0.1)}  # fmt: skip
    body = b"".join(key(f"k{kind}", kind, struct.pack("<" + code, value)) for kind, (code, value) in scalars.items())
    body += key("list", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)) + key(
        "words", 9, struct.pack("<IQ", 8, 2) + text("ä") + text("")
    )
    path = tmp_path / "values.gguf"
    path.write_bytes(header(keys=len(scalars) + 2) + body)
    found = read_gguf(path).metadata
    assert found == {f"k{kind}": value for kind, (_, value) in scalars.items()} | {"list": [1, -2, 3], "words": ["ä", ""]}


def test_a_file_is_parsed_once_until_it_changes(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small.read_bytes())
    first = read_gguf(path)
    assert read_gguf(str(path)) is first
    path.write_bytes(header(keys=1) + ARCHITECTURE)
    assert read_gguf(path) is not first
    for i in range(10):
        (tmp_path / f"{i}.gguf").write_bytes(header(keys=1) + ARCHITECTURE)
        read_gguf(tmp_path / f"{i}.gguf")
    assert len(gguf_metadata._cache) <= 4


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "0 bytes"),
        (b"GGUF\x03", "5 bytes"),
        (b"PK\x03\x04" + bytes(100), "starts with b'PK"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git-lfs pointer"),
        (header(version=99) + bytes(100), "version 99"),
        (header(version=1) + bytes(100), "version 1 "),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(keys=2**60), "claims"),
        (header(tensors=2**60), "claims"),
        (header(keys=1) + struct.pack("<Q", 2**50) + bytes(100), "truncated"),
        (header(keys=1) + key("general.name", 8, struct.pack("<Q", 2**62)), "truncated: general.name"),
        (header(keys=1) + key("tokens", 9, struct.pack("<IQ", 8, 2**61)), "truncated: tokens"),
        (header(keys=1) + key("tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + struct.pack("<Q", 9)), "'tokens'"),
        (header(keys=1) + key("scores", 9, struct.pack("<IQ", 6, 2**61)), "truncated: scores"),
        (header(keys=1) + key("nested", 9, struct.pack("<IQ", 9, 1) + bytes(64)), "array of value type 9"),
        (header(keys=1) + key("odd", 77, bytes(8)), "value type 77"),
        (header(keys=2) + ARCHITECTURE * 2, "twice"),
        (header(keys=1) + key("bad", 8, struct.pack("<Q", 2) + b"\xff\xfe"), "not UTF-8"),
        (header(keys=1) + key("bad", 9, struct.pack("<IQQ", 8, 1, 2) + b"\xff\xfe"), "item 0"),
        (header(keys=1) + key("general.alignment", 4, struct.pack("<I", 24)), "power of two"),
        (header(tensors=1) + tensor("w", (4,), 0), "truncated: tensor 'w' ends at byte"),
        (header(tensors=1) + tensor("w", (2**40, 2**20), 0), "truncated: tensor 'w'"),
        (header(tensors=1) + tensor("w", (4,), 0, 2**60) + bytes(64), "truncated: tensor 'w'"),
        (header(tensors=1) + tensor("w", (0, 4), 0) + bytes(64), "shape"),
        (header(tensors=1) + tensor("w", (1,) * 5, 0) + bytes(64), "5 dimensions"),
        (header(tensors=1) + text("w") + struct.pack("<IQ", 2**31, 1) + bytes(64), "dimensions"),
        (header(tensors=1) + tensor("w", (33,), 8) + bytes(64), "Q8_0 has rows of 33"),
        (header(tensors=1) + tensor("w", (32,), 99) + bytes(64), "tensor 'w' has the type number 99"),
        (header(tensors=1) + tensor("w", (32,), 4) + bytes(64), "Q4_2 (number 4)"),
        (header(tensors=2) + tensor("w", (1,), 0) * 2 + bytes(64), "twice"),
    ],
)
def test_a_defect_is_named_with_the_file(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(WeightsError) as error:
        read_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in str(error.value)
    assert expected in str(error.value)
    assert peak < 1 << 20, "memory in proportion to what a broken header claims"


def test_every_truncation_is_noticed(small: Path, tmp_path: Path) -> None:
    content = small.read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [0, 3, 8, 23, 24, 100, 1000, 5000, 20_000, len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(WeightsError, match=r"cut\.gguf"):
            read_gguf(path)


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"absent\.gguf: cannot be read: No such file"):
        read_gguf(tmp_path / "absent.gguf")
    with pytest.raises(WeightsError, match="cannot be read: Is a directory"):
        read_gguf(tmp_path)
