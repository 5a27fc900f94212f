"""Checkpoints as they are found: other names, names without a prefix, tied heads in any form. Ranks read their part alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pegboard.contracts.model_source import ModelSource
from pegboard.contracts.weight_loader import WeightsError
from pegboard.testing.memory_weights import memory_handles
from pegboard.testing.model_session import ModelSession
from pegboard.testing.ranks_session import made_ranks
from pegboard_plugins.models.transformers.model import TransformersModel
from pegboard_plugins.models.transformers.spec import transformers_spec

from .conftest import random_prompts


def make(checkpoint: Any, dtype: torch.dtype = torch.float32, *rank: Any) -> TransformersModel:
    spec = transformers_spec(ModelSource("tiny", str(checkpoint.folder), "safetensors", "hf", checkpoint.content))
    return TransformersModel(spec, dtype, torch.device("cpu"), *rank)


def stored(checkpoint: Any) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.folder / "model.safetensors")


def logits(checkpoint: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    model = make(checkpoint)
    model.load_weights(memory_handles(tensors))
    return ModelSession(model).step({"a": random_prompts(9)[0]})["a"]


def test_names_without_the_base_model_s_prefix(tiny: Any) -> None:
    """As those of GPT-2 on the hub."""
    tensors = stored(tiny("gpt2"))
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert bare.keys() != tensors.keys()
    assert torch.equal(logits(tiny("gpt2"), bare), logits(tiny("gpt2"), tensors))


def test_experts_apart_or_joined(tiny: Any) -> None:
    """As single tensors of each expert, or as the parameters of the model."""
    apart, joined = stored(tiny("mixtral")), dict(tiny("mixtral").model.state_dict())
    assert len(apart) > len(joined)
    assert torch.equal(logits(tiny("mixtral"), apart), logits(tiny("mixtral"), joined))


def test_a_tied_head_is_one_tensor(tiny: Any) -> None:
    checkpoint, tensors = tiny("gemma2"), stored(tiny("gemma2"))
    table, head = "model.embed_tokens.weight", "lm_head.weight"
    wanted = logits(checkpoint, tensors)
    model = make(checkpoint)
    model.load_weights(memory_handles(tensors))
    held = model.parameters()
    assert head not in held or held[head].layout != torch.strided, "once, besides a form of its own for products"
    both = {**tensors, head: tensors[table].clone()}
    under_the_head = {head: tensors[table], **{n: t for n, t in tensors.items() if n != table}}
    for variant in (both, under_the_head):
        assert torch.equal(logits(checkpoint, variant), wanted)


def test_a_head_that_differs_from_the_table_is_used(tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint, tensors = tiny("gemma2"), stored(tiny("gemma2"))
    other = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].flip(0)}
    assert torch.equal(logits(checkpoint, other), logits(checkpoint, tensors).flip(1))
    assert "holds different values for both" in caplog.text


def test_a_missing_expert_is_named(tiny: Any) -> None:
    tensors = stored(tiny("mixtral"))
    [name, *_] = [n for n in tensors if "experts.2" in n]
    del tensors[name]
    with pytest.raises(WeightsError, match=name.replace(".", r"\.")):
        make(tiny("mixtral")).load_weights(memory_handles(tensors))


def test_two_tensors_for_one_parameter_are_refused(tiny: Any) -> None:
    tensors = stored(tiny("gpt2"))
    tensors["wpe.weight"] = tensors["transformer.wpe.weight"].clone()
    with pytest.raises(WeightsError, match=r"transformer\.wpe\.weight.*wpe\.weight"):
        make(tiny("gpt2")).load_weights(memory_handles(tensors))


def test_weights_take_the_dtype_that_is_asked_for(tiny: Any) -> None:
    model = make(tiny("olmo"), torch.bfloat16)
    model.load_weights(memory_handles(stored(tiny("olmo"))))
    assert {tensor.dtype for tensor in model.parameters().values()} == {torch.bfloat16}
    buffers = {name: b for name, b in model.body.named_buffers() if name.endswith("inv_freq")}
    assert {buffer.dtype for buffer in buffers.values()} == {torch.float32}, "frequencies keep their precision"


@pytest.mark.parametrize("name", ["mixtral", "gpt-neox", "olmo"])
def test_ranks_read_their_parts_alone(tiny: Any, name: str) -> None:
    checkpoint = tiny(name)
    handles = memory_handles(stored(checkpoint))
    with made_ranks(lambda *rank: make(checkpoint, torch.float32, *rank), 2, 1, 3, handles) as models:
        held = sum(tensor.numel() for model in models for tensor in model.parameters().values())
    total = sum(handle.tensor.numel() for handle in handles.values())
    small = sum(handle.tensor.numel() for handle in handles.values() if handle.tensor.ndim < 2 or "gate.weight" in handle.name)
    assert sum(handle.numbers for handle in handles.values()) <= total + small
    assert total <= held <= total + small
