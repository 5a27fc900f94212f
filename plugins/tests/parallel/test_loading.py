"""What each rank reads of a checkpoint: its part and no more, with all of the checkpoint checked before."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.contracts.model_source import ModelSource
from pegboard.contracts.weight_loader import WeightsError
from pegboard.plugins.parallel import stage_layers
from pegboard.testing.checkpoints import ARCHITECTURES, make_checkpoint, random_tensors
from pegboard.testing.gguf_files import write_gguf
from pegboard.testing.memory_weights import memory_handles
from pegboard.wire import World
from pegboard_plugins.loaders import gguf_loader
from pegboard_plugins.loaders.gguf_loader import GGUFLoader
from pegboard_plugins.loaders.safetensors_loader import SafetensorsHandle, SafetensorsLoader
from pegboard_plugins.models.llama import LlamaForCausalLM
from pegboard_plugins.models.spec import llama_spec

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SIZES = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64,
}  # fmt: skip


class Silent:
    """Takes the place of a communicator while nothing is computed."""


def config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **ARCHITECTURES[architecture], **SIZES, **changes}


def rank_model(stated: dict[str, Any], rank: int, tp: int, pp: int, dtype: torch.dtype = torch.float16) -> LlamaForCausalLM:
    """float16 on a CPU is kept as it is, so that parameters can be compared."""
    spec = llama_spec(ModelSource("tiny", "tiny", "dummy", "hf", stated))
    world = World(rank=rank, tp_size=tp, pp_size=pp)
    layers = stage_layers(spec.num_layers, pp)[world.pp_rank]
    return LlamaForCausalLM(spec, dtype, torch.device("cpu"), world, Silent() if tp > 1 else None, layers)  # type: ignore[arg-type]


def loaded(stated: dict[str, Any], tp: int, pp: int) -> list[tuple[dict[str, torch.Tensor], dict[str, int]]]:
    """Per rank: its parameters, and how many numbers it has read of each tensor."""
    tensors, found = random_tensors(stated, seed=3, dtype="float16"), []
    for rank in range(tp * pp):
        model, handles = rank_model(stated, rank, tp, pp), memory_handles(tensors)
        model.load_weights(handles)
        found.append((model.parameters(), {name: handle.numbers for name, handle in handles.items() if handle.numbers}))
    return found


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tied", [True, False])
def test_parts_make_up_the_whole(architecture: str, tied: bool) -> None:
    bias = {"attention_bias": True, "mlp_bias": True} if architecture == "LlamaForCausalLM" else {}
    stated = config(architecture, tie_word_embeddings=tied, **bias)
    ((whole, _),) = loaded(stated, 1, 1)
    parts = [parameters for parameters, _ in loaded(stated, 2, 1)]
    for name, tensor in whole.items():
        own = [part[name] for part in parts if name in part]
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert torch.equal(torch.cat(own, 1), tensor), name
        elif name in (TABLE, HEAD):
            assert [len(part) for part in own] == [51, 51]
            assert torch.equal(torch.cat(own)[:101], tensor)
            assert not own[1][50:].any(), "rows that only pad"
        elif name.endswith(("o_proj.bias", "down_proj.bias")):
            assert len(own) == 1, "added once"
            assert torch.equal(own[0], tensor)
            assert name in parts[0]
        elif "qkv_proj" in name:
            q, k, v = tensor.split([32, 8, 8])
            wanted = [torch.cat([each.chunk(2)[rank] for each in (q, k, v)]) for rank in range(2)]
            assert all(torch.equal(a, b) for a, b in zip(own, wanted, strict=True)), name
        elif "gate_up" in name:
            gate, up = tensor.chunk(2)
            wanted = [torch.cat([each.chunk(2)[rank] for each in (gate, up)]) for rank in range(2)]
            assert all(torch.equal(a, b) for a, b in zip(own, wanted, strict=True)), name
        elif "qk_norm" in name:
            assert torch.equal(own[0], torch.cat([tensor[:4], tensor[8:9]])), name
        else:
            assert all(torch.equal(part, tensor) for part in own), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 3), (2, 2)])
def test_each_rank_reads_its_part(tp: int, pp: int, tied: bool) -> None:
    """Vectors are read by all, key heads by those that share them, and nothing is read twice; a tied table by both ends."""
    stated = config(tie_word_embeddings=tied)
    sizes = {name: tensor.numel() for name, tensor in random_tensors(stated).items()}
    read = [numbers for _, numbers in loaded(stated, tp, pp)]
    layers = stage_layers(3, pp)
    for rank, numbers in enumerate(read):
        stage, place = divmod(rank, tp)
        wanted = {name: size for name, size in sizes.items() if _belongs(name, layers[stage], stage, pp, tied)}
        rows = min(51 if tp == 2 else 26 if tp == 4 else 101, 101 - place * -(-101 // tp))
        for name, size in wanted.items():
            if name in (TABLE, HEAD):
                share = rows * 32
            elif name.endswith(("k_proj.weight", "v_proj.weight")):
                share = size // min(tp, 2)
            else:
                share = size // tp if len(_shape(stated, name)) > 1 else size
            assert numbers.pop(name) == share, (rank, name)
        assert not numbers, "nothing that belongs to others"


def _belongs(name: str, layers: range, stage: int, pp: int, tied: bool) -> bool:
    if name == TABLE:
        return stage == 0 or (tied and stage == pp - 1)
    if name in (HEAD, "model.norm.weight"):
        return stage == pp - 1
    return int(name.split(".")[2]) in layers


def _shape(stated: dict[str, Any], name: str) -> tuple[int, ...]:
    return tuple(random_tensors(stated)[name].shape)


def test_a_tensor_of_any_stage_is_missed_by_all() -> None:
    stated = config()
    tensors = random_tensors(stated)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    for rank in range(4):
        handles = memory_handles(tensors)
        with pytest.raises(WeightsError, match=r"model\.layers\.2\.mlp\.up_proj\.weight \[48, 32\]"):
            rank_model(stated, rank, 2, 2).load_weights(handles)
        assert not any(handle.reads for handle in handles.values())


@pytest.mark.parametrize("differs", [True, False])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_a_head_beside_a_tied_table(ranks: Any, tmp_path: Path, caplog: Any, differs: bool, tp: int, pp: int) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[HEAD] = tensors[TABLE].flip(0).clone() if differs else tensors[TABLE].clone()

    folder = make_checkpoint(tmp_path, tie_word_embeddings=True, edit=edit, tokenizer=False)

    def tokens(several: Any) -> Any:
        several.driver.add("a", [1, 2, 3])
        return several.driver.generate(20)

    caplog.set_level(logging.WARNING)
    wanted = tokens(ranks(folder))
    caplog.clear()
    assert tokens(ranks(folder, tp, pp)) == wanted
    assert (HEAD in caplog.text) == differs


def test_dummy_weights_are_the_same_on_any_number_of_ranks(ranks: Any, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, num_layers=3, tokenizer=False)

    def tokens(tp: int, pp: int) -> Any:
        several = ranks(folder, tp, pp, load_format="dummy", seed=7)
        several.driver.add("a", [1, 2, 3])
        return several.driver.generate(20)

    assert tokens(1, 1) == tokens(2, 1) == tokens(1, 3)


def test_bytes_read_of_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path, num_layers=4, hidden_size=128, vocab_size=2000, num_heads=8, num_kv_heads=4)
    read: list[int] = []
    for method in ("read", "read_slice"):
        original = getattr(SafetensorsHandle, method)
        monkeypatch.setattr(SafetensorsHandle, method, _counted(original, read))
    assert_shares(folder, SafetensorsLoader(), read)


def _counted(original: Any, read: list[int]) -> Any:
    def counted(*args: Any) -> torch.Tensor:
        tensor: torch.Tensor = original(*args)
        read.append(tensor.nbytes)
        return tensor

    return counted


@pytest.mark.parametrize("file_type", ["Q8_0", "BF16"])
def test_bytes_read_of_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_type: str) -> None:
    """Of o and down, whose columns are shared, whole rows are read."""
    folder = make_checkpoint(tmp_path, num_layers=4, hidden_size=128, vocab_size=2000, num_heads=8, num_kv_heads=4)
    path = write_gguf(folder, tmp_path / "model.gguf", file_type)
    read: list[int] = []
    original = gguf_loader._Reader.read

    def counted(self: Any, offset: int, length: int) -> Any:
        read.append(length)
        return original(self, offset, length)

    monkeypatch.setattr(gguf_loader._Reader, "read", counted)
    assert_shares(folder, GGUFLoader(), read, path)


def assert_shares(folder: Path, loader: Any, read: list[int], path: Path | None = None) -> None:
    stated = json.loads((folder / "config.json").read_text())
    source = ModelSource(str(folder), str(path or folder), "any", "hf", stated)

    def amounts(tp: int, pp: int) -> list[float]:
        found = []
        for rank in range(tp * pp):
            read.clear()
            with loader.open(source, None) as handles:
                rank_model(stated, rank, tp, pp).load_weights(handles)
            found.append(sum(read))
        return found

    (whole,) = amounts(1, 1)
    with loader.open(source, None) as handles:
        sizes = {name: math.prod(handle.shape) for name, handle in handles.items()}
    columns = sum(size for name, size in sizes.items() if name.endswith(("o_proj.weight", "down_proj.weight")))
    entire = columns / sum(sizes.values()) if path is not None else 0.0
    for tp in (2, 4):
        for share in amounts(tp, 1):
            assert 1 / tp <= share / whole < entire + (1 - entire) / tp + 0.01
    assert math.isclose(sum(amounts(1, 2)), whole)
    assert max(amounts(1, 4)) < 0.5 * whole
