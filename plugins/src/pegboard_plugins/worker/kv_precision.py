"""What the KV cache of a worker stores: the type of its numbers, their scales, and the attention backends that can work on it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from pegboard.contracts.attention import KVScales
from pegboard.contracts.model import Model
from pegboard.contracts.weight_loader import WeightHandle
from pegboard_plugins.worker.attention_groups import AttentionChoices
from pegboard_plugins.worker.dtypes import FLOAT8
from pegboard_plugins.worker.kv_scales import Scales, measured_scales, read_scale, split_scales, stored_scales, with_scales
from pegboard_plugins.worker.links import Stage

if TYPE_CHECKING:
    from pegboard.plugins import Composition

log = logging.getLogger(__name__)


class KVPrecision:
    """One worker's. ``name`` and ``dtype``: the type, as a name of torch's.

    A float8 cache uses the checkpoint's scales, or none where it has none: its numbers keep their relative precision over a wide
    range. An int8 cache is nothing without scales: they are measured, as those of checkpoints are meant for float8.
    """

    def __init__(self, composition: Composition, dtype: str) -> None:
        """``dtype``: in which the model computes."""
        self._composition, self._compute = composition, dtype
        self._settings = composition.config.kv_cache
        self.name = self._settings.stored_dtype(dtype)
        self.dtype: torch.dtype = getattr(torch, self.name)
        self._stored: dict[tuple[str, str], float] = {}

    def take_scales(self, weights: Mapping[str, WeightHandle]) -> Mapping[str, WeightHandle]:
        """The weights without scales of keys and values, which are read if they are needed. Raises ``WeightsError`` for what is
        not one positive number."""
        rest, found = split_scales(weights)
        if self.name == FLOAT8:
            self._stored = {key: read_scale(handle) for key, handle in found.items()}
            source = "of the checkpoint" if found else "1, as the checkpoint has none"
            log.info("scales of keys and values: %s", source)
        return rest

    def attention(self, model: Model, longest: int, device: torch.device, stage: Stage) -> AttentionChoices:
        """Backends for the model's layers, which know the scales. ``longest``: tokens of a request at most.

        Raises ``CompositionError`` where no backend can serve some layer, ``WeightsError`` where the checkpoint has only some of
        the scales, and ``ValueError`` for int8 with pipeline stages.
        """
        layers, block_size = model.attention_layers, self._settings.block_size
        scales: Scales = stored_scales(self._stored, layers)
        measured = self.name == "int8"
        if measured and not stage.is_only:
            raise ValueError(
                "kv_cache.dtype = 'int8': its scales are measured by a forward of the whole model, of which a pipeline stage has "
                "only a part; use 'fp8_e4m3', or share the layers with executor.tensor_parallel_size"
            )
        kind: KVScales = "head" if measured else "tensor" if scales else "none"
        choices = AttentionChoices(layers, self._composition, device, self._compute, block_size, self.name, kind)
        if measured:
            dtype, vocab_size = getattr(torch, self._compute), self._composition.spec.vocab_size
            scales = measured_scales(model, choices.plain(), dtype, block_size, longest, vocab_size, device, stage)
        if scales:
            choices.use_scales(with_scales(layers, scales))
        return choices
