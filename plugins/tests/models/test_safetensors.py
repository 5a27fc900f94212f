"""Damaged and incomplete safetensors checkpoints: refused at once, naming the file and what is wrong."""

import json
import struct

import pytest

from pegboard.contracts.weight_loader import WeightsError
from pegboard.testing.checkpoints import make_checkpoint
from pegboard_plugins.loaders.safetensors_loader import SafetensorsLoader


@pytest.fixture
def folder(tmp_path):
    return make_checkpoint(tmp_path, shards=3, tokenizer=False, vocab_size=100)


@pytest.fixture
def last(folder):
    return folder / "model-00003-of-00003.safetensors"


@pytest.fixture
def refusal(folder, source_of):
    def make():
        with pytest.raises(WeightsError) as caught, SafetensorsLoader().open(source_of(folder), None):
            pass
        return str(caught.value)

    return make


@pytest.mark.parametrize(("cut", "word"), [(1, "truncated"), (0.5, "truncated")])
def test_a_cut_file_tells_both_sizes(cut, word, last, refusal):
    content = last.read_bytes()
    kept = len(content) - 1 if cut == 1 else int(len(content) * cut)
    last.write_bytes(content[:kept])
    message = refusal()
    header = struct.unpack("<Q", content[:8])[0]
    assert all(part in message for part in (last.name, word, str(len(content) - 8 - header), str(kept - 8 - header)))


@pytest.mark.parametrize("size", [0, 5, 8])
def test_a_stump_is_truncated(size, last, refusal):
    last.write_bytes(last.read_bytes()[:size])
    message = refusal()
    assert last.name in message
    assert "truncated" in message


def test_a_longer_file_is_corrupt(last, refusal):
    last.write_bytes(last.read_bytes() + b"x")
    assert f"{last.name} is corrupt" in refusal()


def test_a_git_lfs_pointer_is_told_with_the_remedy(last, refusal):
    last.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269060552\n")
    message = refusal()
    assert last.name in message
    assert "git lfs pull" in message


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 10**7])
def test_a_huge_header_length_allocates_nothing(length, last, refusal):
    last.write_bytes(struct.pack("<Q", length) + last.read_bytes()[8:])
    message = refusal()
    assert last.name in message
    assert str(length) in message


def rewrite_header(file, change):
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    header = change(header) or header
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + length :])


def _flip_dtype(header):
    header["model.norm.weight"]["dtype"] = "BF16"


def _unknown_dtype(header):
    header["model.norm.weight"]["dtype"] = "Q7"


def _listed_dtype(header):
    header["model.norm.weight"]["dtype"] = ["F32"]


def _shift(header):
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [offset + 4 for offset in entry["data_offsets"]]


def _negative(header):
    header["model.norm.weight"]["shape"] = [-64]


def _no_offsets(header):
    del header["model.norm.weight"]["data_offsets"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (_flip_dtype, "model.norm.weight"),
        (_unknown_dtype, "Q7"),
        (_listed_dtype, "unknown dtype ['F32']"),
        (_shift, "starts at byte 4"),
        (_negative, "model.norm.weight"),
        (_no_offsets, "model.norm.weight"),
        (lambda header: b"{nonsense", "not JSON"),
        (lambda header: b"[1, 2]", "not a JSON object"),
        (lambda header: b"[" * 10**5, "not JSON"),
    ],
)
def test_a_damaged_header_is_told(change, part, last, refusal):
    rewrite_header(last, change)
    message = refusal()
    assert last.name in message
    assert part in message


def test_a_directory_in_its_place(last, refusal):
    last.unlink()
    last.mkdir()
    assert f"{last.name} is a directory" in refusal()


def test_permission_denied(last, refusal, monkeypatch):
    real_open = type(last).open  # replaced, because permissions of files do not bind root

    def refuse(self, *args, **kwargs):
        if self == last:
            raise PermissionError(13, "Permission denied", str(self))
        return real_open(self, *args, **kwargs)

    monkeypatch.setattr(type(last), "open", refuse)
    message = refusal()
    assert last.name in message
    assert "Permission denied" in message


def test_a_missing_shard(last, refusal):
    last.unlink()
    message = refusal()
    assert last.name in message
    assert "1 of 3 files" in message


def test_an_index_that_names_another_shard(folder, last, refusal):
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(content))
    assert "model.norm.weight (model-00001-of-00003.safetensors)" in refusal()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {"a": 3}}'])
def test_a_damaged_index(content, folder, refusal):
    (folder / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json is corrupt" in refusal()


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd"])
def test_an_index_cannot_point_outside_its_folder(name, folder, refusal):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "outside its folder" in refusal()


def test_shards_without_an_index_are_found(folder, source_of, load):
    (folder / "model.safetensors.index.json").unlink()
    load(folder)


def test_the_same_tensor_in_two_files(folder, last, refusal):
    (folder / "model.safetensors.index.json").unlink()
    (folder / "extra.safetensors").write_bytes(last.read_bytes())
    message = refusal()
    assert "extra.safetensors" in message
    assert last.name in message


def test_only_other_formats(folder, refusal):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin must be converted" in refusal()


def test_a_single_file_as_the_model(folder, source_of):
    from dataclasses import replace

    source = replace(source_of(folder), path=str(folder / "model-00001-of-00003.safetensors"))
    with SafetensorsLoader().open(source, None) as handles:
        assert "model.embed_tokens.weight" in handles
