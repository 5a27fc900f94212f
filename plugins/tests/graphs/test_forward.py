"""What is captured touches the device only: a tensor of the host in a forward would be copied while recording, which no device
allows, and on the processor no recording notices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pegboard.contracts.model import AttentionGroup, ForwardContext
from pegboard.engine.bootstrap import prepare
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.wire import World

META = torch.device("meta")
"""A device without memory, on which operations have shapes only."""
LAYERS = 4


class OnDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that take or make tensors of the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors((args, kwargs, result)):
            assert tensor.device == META, f"{func} has a tensor of the host, of shape {list(tensor.shape)}"
        return result


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors(each)


def forward(folder: Path, layers: range, world: World) -> Any:
    """Of three tokens, through attention that copies its queries."""
    composition = prepare(model=str(folder), load_format="dummy").composition
    alike = SimpleNamespace(rank=world.tp_rank, world_size=world.tp_size, all_reduce=lambda tensor: tensor)
    options = {"dtype": torch.bfloat16, "device": META, "world": world, "communicator": alike, "layers": layers}
    model: Any = composition.create("model", **options)
    with composition.create("weight_loader").open(composition.source, composition.spec) as weights:
        model.load_weights(weights)
    assert model.capturable
    copying = SimpleNamespace(forward=lambda layer, query, *rest: rest[-1].copy_(query))
    groups = {layer.name: AttentionGroup(copying, None) for layer in model.attention_layers}  # type: ignore[arg-type]
    context = ForwardContext(groups, dict.fromkeys(groups, torch.empty(0, device=META)))
    ids = torch.zeros(3, dtype=torch.int64, device=META)
    widths = {} if world.is_first_stage else model.intermediate_widths(composition.spec)
    before = {name: torch.zeros(3, width, dtype=torch.bfloat16, device=META) for name, width in widths.items()}
    with OnDevice():
        return model.forward(ids, ids, context, before or None)


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"],
)
def test_a_forward_makes_nothing_on_the_host(tmp_path: Path, architecture: str) -> None:
    folder = make_checkpoint(tmp_path, architecture, num_layers=LAYERS)
    assert forward(folder, range(LAYERS), World()).shape == (3, 64)


@pytest.mark.parametrize("rank", range(4))
def test_nor_does_that_of_a_rank(tmp_path: Path, rank: int) -> None:
    folder = make_checkpoint(tmp_path, num_layers=LAYERS)
    world = World(rank=rank, tp_size=2, pp_size=2)
    layers = range(LAYERS // 2) if world.is_first_stage else range(LAYERS // 2, LAYERS)
    found = forward(folder, layers, world)
    assert (found["hidden"] if world.is_first_stage else found).shape == (3, 64)


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_nor_do_stretched_positions(tmp_path: Path, rope: str) -> None:
    options = {"rope_type": rope, "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    if rope == "llama3":
        options |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    folder = make_checkpoint(tmp_path, num_layers=1, config_overrides={"rope_parameters": options})
    assert forward(folder, range(1), World()).shape == (3, 64)


def test_one_that_does_is_noticed() -> None:
    with pytest.raises(AssertionError, match="has a tensor of the host"), OnDevice():
        torch.zeros(3, device=META) + torch.tensor(1.0)
