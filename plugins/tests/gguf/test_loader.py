"""Tensors of GGUF files: equal to the checkpoint they were written from, under its names, whole and in slices."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pegboard.contracts.model_source import ModelSource
from pegboard.contracts.weight_loader import WeightsError
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.conformance.weight_loader import WeightLoaderConformance
from pegboard.testing.gguf_files import write_gguf
from pegboard_plugins.loaders import gguf_loader
from pegboard_plugins.loaders.gguf_loader import GGUFLoader
from pegboard_plugins.loaders.gguf_names import hf_name, row_order

ARCHITECTURES = (
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
)  # fmt: skip
TOLERANCE = {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8}
"""Relative to the values: half of what the type's last bit is worth."""


def open_gguf(path: Path):
    return GGUFLoader().open(ModelSource(str(path), str(path), "gguf", "gguf", {}))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    bias = {"attention_bias": True, "mlp_bias": True} if request.param == "LlamaForCausalLM" else {}
    return make_checkpoint(folder, request.param, num_heads=4, num_kv_heads=2, head_dim=32, config_overrides=bias)


def originals(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Its tensors. Gemma's norms are stored with one added, which rounds them."""
    tensors = load_file(checkpoint / "model.safetensors")
    rounded = "post_feedforward_layernorm" in " ".join(tensors)
    return {name: tensor + 1 - 1 if rounded and name.endswith("norm.weight") else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("file_type", ["F32", "F16", "BF16"])
def test_float_types_are_kept(checkpoint: Path, tmp_path: Path, file_type: str) -> None:
    path = write_gguf(checkpoint, tmp_path / "model.gguf", file_type)
    expected = originals(checkpoint)
    stored = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[file_type]
    with open_gguf(path) as handles:
        assert set(handles) == set(expected)
        for name, handle in handles.items():
            found = handle.read()
            assert (handle.name, handle.shape, found.shape) == (name, tuple(expected[name].shape), expected[name].shape)
            assert found.dtype == (stored if found.ndim > 1 else torch.float32)
            assert handle.dtype == str(found.dtype).removeprefix("torch.")
            error = (found.float() - expected[name]).abs()
            assert torch.all(error <= TOLERANCE[file_type] * expected[name].abs() + 1e-7)


@pytest.mark.parametrize("file_type", ["Q8_0", "Q5_1", "Q4_1", "Q4_0", "MXFP4"])
def test_quantised_types_are_what_the_gguf_package_makes_of_them(checkpoint: Path, tmp_path: Path, file_type: str) -> None:
    path = write_gguf(checkpoint, tmp_path / "model.gguf", file_type)
    kind = gguf.GGMLQuantizationType[file_type]
    expected = originals(checkpoint)
    with open_gguf(path) as handles:
        for name, handle in handles.items():
            found = handle.read()
            assert handle.dtype == "float32"
            assert found.dtype == torch.float32
            reference = expected[name].numpy()
            if found.ndim > 1:  # blocks lie within rows, so the order of rows does not change them
                reference = gguf.quants.dequantize(gguf.quants.quantize(reference, kind), kind)
            assert np.array_equal(found.numpy(), reference)


@pytest.mark.parametrize("file_type", ["F32", "F16", "Q8_0"])
def test_slices_are_parts_of_the_whole(checkpoint: Path, tmp_path: Path, file_type: str) -> None:
    with open_gguf(write_gguf(checkpoint, tmp_path / "model.gguf", file_type)) as handles:
        for handle in handles.values():
            whole = handle.read()
            for dim in range(whole.ndim):
                size = whole.shape[dim]
                for start, length in ((0, size), (0, size // 2), (size // 2, size - size // 2), (size // 3, 1), (size, 0)):
                    assert torch.equal(handle.read_slice(dim, start, length), whole.narrow(dim, start, length)), handle.name


def test_a_slice_of_rows_reads_those_rows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=16)
    path = write_gguf(tmp_path, tmp_path / "model.gguf", "Q8_0")
    read: list[int] = []
    original = gguf_loader._Reader.read

    def counted(self: gguf_loader._Reader, offset: int, length: int) -> np.ndarray:
        read.append(length)
        return original(self, offset, length)

    monkeypatch.setattr(gguf_loader._Reader, "read", counted)
    with open_gguf(path) as handles:
        for name, rows, expected in (
            ("model.embed_tokens.weight", 10, 10),
            ("model.layers.0.self_attn.q_proj.weight", 16, 16),  # one head: reordered only within itself
            ("model.layers.0.mlp.down_proj.weight", 5, 5),
        ):
            read.clear()
            handle = handles[name]
            handle.read_slice(0, 16, rows)
            assert sum(read) == expected * handle.shape[1] // 32 * 34


def test_large_tensors_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, num_layers=1, head_dim=32)
    path = write_gguf(tmp_path, tmp_path / "model.gguf", "Q8_0")
    with open_gguf(path) as handles:
        whole = {name: handle.read() for name, handle in handles.items()}
        monkeypatch.setattr(gguf_loader, "_CHUNK_BYTES", 500)
        monkeypatch.setattr(gguf_loader, "_RUN_BLOCKS", 5)
        for name, handle in handles.items():
            assert torch.equal(handle.read(), whole[name])


@pytest.mark.parametrize(("dim", "start", "length"), [(2, 0, 1), (-3, 0, 1), (0, -1, 1), (0, 0, 10**6), (0, 5, -1)])
def test_slices_outside_the_tensor_are_refused(tmp_path: Path, dim: int, start: int, length: int) -> None:
    make_checkpoint(tmp_path, num_layers=1)
    with open_gguf(write_gguf(tmp_path, tmp_path / "model.gguf")) as handles, pytest.raises(ValueError, match="has no slice"):
        handles["model.embed_tokens.weight"].read_slice(dim, start, length)


def test_what_was_read_belongs_to_the_reader(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_layers=1)
    with open_gguf(write_gguf(tmp_path, tmp_path / "model.gguf")) as handles:
        handle = handles["model.norm.weight"]
        first = handle.read()
        first.zero_()
        assert not torch.equal(handle.read(), first)
    with pytest.raises(ValueError, match="after the loader's context"):
        handle.read()


def test_a_file_that_shrinks_while_open_is_an_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_layers=1)
    path = write_gguf(tmp_path, tmp_path / "model.gguf")
    with open_gguf(path) as handles:
        os.truncate(path, 5000)
        with pytest.raises(WeightsError, match="truncated while being read"):
            handles["model.embed_tokens.weight"].read()


def test_types_that_cannot_be_dequantised_are_named(tmp_path: Path) -> None:
    name = b"blk.0.attn_q.weight"
    entry = struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 32, gguf.GGMLQuantizationType.Q8_1, 0)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry + bytes(100))
    with pytest.raises(WeightsError, match=r"model.gguf: tensor 'blk.0.attn_q.weight' has the type Q8_1, which"):
        open_gguf(path)


def test_unknown_names_are_kept_and_repeated_configuration_is_not_a_weight(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_layers=1)
    extra = {"foo.bar": np.ones((2, 2), np.float32), "rope_freqs.weight": np.ones(8, np.float32)}
    path = write_gguf(tmp_path, tmp_path / "model.gguf", edit=lambda tensors: tensors.update(extra))
    with open_gguf(path) as handles:
        assert "foo.bar" in handles
        assert not any("rope" in name for name in handles)


def test_names() -> None:
    assert hf_name("token_embd.weight", "llama") == "model.embed_tokens.weight"
    assert hf_name("output.weight", "llama") == "lm_head.weight"
    assert hf_name("blk.11.attn_k_norm.weight", "qwen3") == "model.layers.11.self_attn.k_norm.weight"
    assert hf_name("blk.3.attn_q.bias", "qwen2") == "model.layers.3.self_attn.q_proj.bias"
    assert hf_name("blk.3.ffn_norm.weight", "llama") == "model.layers.3.post_attention_layernorm.weight"
    assert hf_name("blk.3.ffn_norm.weight", "gemma3") == "model.layers.3.pre_feedforward_layernorm.weight"
    assert hf_name("blk.3.post_ffw_norm.weight", "gemma2") == "model.layers.3.post_feedforward_layernorm.weight"
    assert hf_name("blk.3.ffn_gate_exps.weight", "llama") == "blk.3.ffn_gate_exps.weight"


def test_only_queries_and_keys_of_llama_are_reordered() -> None:
    metadata = {"general.architecture": "llama", "llama.attention.head_count": 2, "llama.attention.head_count_kv": 1}
    assert row_order("blk.0.attn_q.weight", 8, metadata).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert row_order("blk.0.attn_k.weight", 4, metadata).tolist() == [0, 2, 1, 3]
    per_layer = metadata | {"llama.attention.head_count": [2, 2], "llama.attention.head_count_kv": [1, 1]}
    assert row_order("blk.0.attn_q.weight", 8, per_layer).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert row_order("blk.0.attn_k.weight", 4, per_layer).tolist() == [0, 2, 1, 3]
    assert row_order("blk.0.attn_v.weight", 4, metadata) is None
    assert row_order("blk.0.attn_q.weight", 8, metadata | {"general.architecture": "qwen2"}) is None


class TestF32(WeightLoaderConformance):
    file_type = "F32"

    def make(self) -> GGUFLoader:
        return GGUFLoader()

    def write(self, folder: Path) -> tuple[ModelSource, Mapping[str, torch.Tensor]]:
        make_checkpoint(folder / "checkpoint", num_layers=1)
        path = write_gguf(folder / "checkpoint", folder / "model.gguf", self.file_type)
        return ModelSource("m", str(path), "gguf", "gguf", {}), load_file(folder / "checkpoint" / "model.safetensors")


class TestF16(TestF32):
    file_type = "F16"
    tolerance = 2e-3


class TestQ8(TestF32):
    file_type = "Q8_0"
    tolerance = 2e-2
