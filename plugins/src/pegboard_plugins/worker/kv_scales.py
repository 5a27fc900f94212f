"""Scales of layers whose keys and values are stored as 8-bit numbers: those of the checkpoint, or measured."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from pegboard.contracts.attention import INT8_LIMIT, AttentionLayer
from pegboard.contracts.model import Model
from pegboard.contracts.weight_loader import WeightHandle, WeightsError
from pegboard_plugins.worker import dummy_step
from pegboard_plugins.worker.attention_groups import LayerGroup
from pegboard_plugins.worker.delegating import recording
from pegboard_plugins.worker.links import Stage

log = logging.getLogger(__name__)

Scales = Mapping[str, tuple[float | torch.Tensor, float | torch.Tensor]]
"""By the name of the attention layer: of its keys and its values, a number or [num_kv_heads] float32."""

_STORED: Final = re.compile(r"(?P<layer>.+?)(?:\.[kv]_proj)?\.(?P<which>[kv])_scale")
"""``model.layers.0.self_attn.k_scale``, or ``….self_attn.k_proj.k_scale`` as some tools write."""
_PROMPTS: Final = 4
_LENGTH: Final = 128
_HEADROOM: Final = 1.1
"""Numbers larger than any in the measurement are cut off from so many times the largest on."""


def split_scales(weights: Mapping[str, WeightHandle]) -> tuple[Mapping[str, WeightHandle], dict[tuple[str, str], WeightHandle]]:
    """A checkpoint's tensors without scales of keys and values; and these, by layer and "k" or "v"."""
    found = {(_text_name(m["layer"]), m["which"]): handle for name, handle in weights.items() if (m := _STORED.fullmatch(name))}
    return {name: handle for name, handle in weights.items() if not _STORED.fullmatch(name)} if found else weights, found


def read_scale(handle: WeightHandle) -> float:
    """Raises ``WeightsError`` for anything but one positive number."""
    values = handle.read().flatten().tolist()
    if len(values) != 1 or not 0 < values[0] < float("inf"):
        raise WeightsError(f"{handle.name} is {values[:4]} of shape {handle.shape}, where one positive number is expected")
    return float(values[0])


def stored_scales(found: Mapping[tuple[str, str], float], layers: Sequence[AttentionLayer]) -> Scales:
    """What a checkpoint says of ``layers``; nothing if it has no scales. Raises ``WeightsError`` if it has only some."""
    names = {layer.name: _text_name(layer.name) for layer in layers}
    missing = [f"{name}.{which}_scale" for name, known in names.items() for which in "kv" if (known, which) not in found]
    if found and missing:
        raise WeightsError(
            f"the checkpoint has scales for keys and values, but lacks {len(missing)} of them: {', '.join(missing[:4])}; "
            "use kv_cache.dtype = 'auto', or add them"
        )
    return {name: (found[known, "k"], found[known, "v"]) for name, known in names.items()} if found else {}


def _text_name(name: str) -> str:
    """Checkpoints with images have the text model in a part of its own, which models that take text alone do not name."""
    return name.replace("language_model.", "", 1)


def with_scales(layers: Sequence[AttentionLayer], scales: Scales) -> list[AttentionLayer]:
    """The layers as attention is to see them."""
    pairs = ((layer, *scales[layer.name]) for layer in layers)
    return [replace(layer, key_scale=key, value_scale=value) for layer, key, value in pairs]


@torch.inference_mode()
def measured_scales(
    model: Model,
    plain: Sequence[LayerGroup],
    dtype: torch.dtype,
    block_size: int,
    longest: int,
    vocab_size: int,
    device: torch.device,
    stage: Stage,
) -> Scales:
    """For int8: what turns the largest keys and values of each head into ``INT8_LIMIT``, on prompts of random tokens, the same
    on every rank. ``plain``: layers on backends for a cache of the model's own ``dtype``, in which this is computed."""
    recorders = [recording(group.backend) for group in plain]
    groups = [LayerGroup(recorder, group.layers) for recorder, group in zip(recorders, plain, strict=True)]
    length = min(_LENGTH, longest)
    blocks = -(-length // block_size)
    caches = dummy_step.scratch_caches(model, groups, block_size, dtype, device, num_blocks=_PROMPTS * blocks)
    with torch.compiler.set_stance("force_eager"):  # once only
        dummy_step.run_forward(
            model,
            groups,
            caches,
            np.full(_PROMPTS, length, np.int32),
            block_size,
            device,
            stage,
            block_table=np.arange(_PROMPTS * blocks, dtype=np.int32).reshape(_PROMPTS, blocks),
            token_ids=np.random.default_rng(0).integers(0, vocab_size, _PROMPTS * length),
        )
    log.info("scales of keys and values: measured head by head on %d random tokens", _PROMPTS * length)
    largest = {name: pair for recorder in recorders for name, pair in recorder.largest.items()}
    return {name: (_scale(keys), _scale(values)) for name, (keys, values) in largest.items()}


def _scale(largest: torch.Tensor) -> torch.Tensor:
    """A head that is always zero gets a scale that leaves it so."""
    return torch.where(largest > 0, largest, 1.0) * (_HEADROOM / INT8_LIMIT)
