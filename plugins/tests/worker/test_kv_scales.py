"""Scales of quantised caches: found in checkpoints, and measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pegboard.config import KVCacheSettings
from pegboard.contracts.attention import AttentionLayer
from pegboard.contracts.weight_loader import WeightsError
from pegboard.testing.memory_weights import memory_handles
from pegboard_plugins.worker.kv_scales import read_scale, split_scales, stored_scales, with_scales

LAYERS = [AttentionLayer(f"model.layers.{i}.self_attn", 4, 2, 16, 0.25) for i in range(2)]


def handles(**tensors: Any) -> Any:
    return memory_handles({name.replace("__", "."): torch.as_tensor(value) for name, value in tensors.items()})


def test_names_of_the_dtype() -> None:
    assert KVCacheSettings().stored_dtype("bfloat16") == "bfloat16"
    assert {KVCacheSettings(dtype=name).stored_dtype("float32") for name in ("fp8", "fp8_e4m3")} == {"float8_e4m3fn"}
    assert KVCacheSettings(dtype="int8").stored_dtype("float32") == "int8"


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("named", ["model.", "model.language_model."])
def test_scales_of_the_text_part_of_a_checkpoint_with_images(prefix: str, named: str) -> None:
    weights = {f"{prefix}layers.{i}.self_attn.{which}_scale": i + 0.5 for i in range(2) for which in "kv"}
    _, found = split_scales(handles(**weights, vision_tower__layers__0__self_attn__k_scale=9.0))
    layers = [replace(layer, name=layer.name.replace("model.", named)) for layer in LAYERS]
    scales = stored_scales({key: read_scale(handle) for key, handle in found.items()}, layers)
    assert scales == {f"{named}layers.{i}.self_attn": (i + 0.5, i + 0.5) for i in range(2)}


def test_scales_are_told_from_weights_in_both_spellings() -> None:
    weights = handles(
        model__layers__0__self_attn__k_scale=0.5,
        model__layers__0__self_attn__v_scale=[0.25],
        model__layers__1__self_attn__k_proj__k_scale=2.0,
        model__layers__1__self_attn__v_proj__v_scale=3.0,
        model__layers__1__self_attn__k_proj__weight=[[1.0]],
        model__layers__1__mlp__k_scaled=[1.0],
    )
    rest, found = split_scales(weights)
    assert set(rest) == {"model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.k_scaled"}
    scales = stored_scales({key: read_scale(handle) for key, handle in found.items()}, LAYERS)
    assert scales == {LAYERS[0].name: (0.5, 0.25), LAYERS[1].name: (2.0, 3.0)}
    assert [layer.value_scale for layer in with_scales(LAYERS, scales)] == [0.25, 3.0]


def test_a_checkpoint_without_scales_has_none() -> None:
    weights = handles(lm_head__weight=[1.0])
    assert split_scales(weights) == (weights, {})
    assert stored_scales({}, LAYERS) == {}


def test_some_scales_only_are_an_error() -> None:
    with pytest.raises(
        WeightsError, match=r"lacks 3 of them: model\.layers\.0\.self_attn\.v_scale, .*use kv_cache\.dtype = 'auto'"
    ):
        stored_scales({(LAYERS[0].name, "k"): 1.0}, LAYERS)


@pytest.mark.parametrize("value", [[1.0, 2.0], 0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_is_one_positive_number(value: Any) -> None:
    [handle] = handles(a__k_scale=value).values()
    with pytest.raises(WeightsError, match=r"a\.k_scale is .*one positive number is expected"):
        read_scale(handle)
