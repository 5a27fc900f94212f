"""Any causal language model of transformers whose attention goes through its attention interface, on paged attention.

The model stays transformers' own code. A step's tokens are given to it as one sequence, with their positions; attention alone
tells requests apart. Its output head runs apart from the body, on the rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from pegboard.contracts.attention import AttentionLayer
from pegboard.contracts.communicator import Communicator
from pegboard.contracts.model import ForwardContext, Model, ModelSpec
from pegboard.contracts.weight_loader import WeightHandle
from pegboard.wire import World
from pegboard_plugins.layers.sharing import Share
from pegboard_plugins.models.transformers.adapters import prepare
from pegboard_plugins.models.transformers.anatomy import Anatomy, look_into
from pegboard_plugins.models.transformers.attention import Slot, Step, put_slot
from pegboard_plugins.models.transformers.build import fill_buffers
from pegboard_plugins.models.transformers.checkpoint import CheckpointNames
from pegboard_plugins.models.transformers.independence import check_rows
from pegboard_plugins.models.transformers.linear import finish_linear
from pegboard_plugins.models.transformers.sharing import Joint, share_model
from pegboard_plugins.models.transformers.stages import keep_stage
from pegboard_plugins.models.transformers.weights import Parameters


class HeadInput(torch.nn.Module):
    """In the place of the body while the head runs: gives it the rows that were put here."""

    def __init__(self, output: type) -> None:
        super().__init__()
        self._output = output
        self.rows: torch.Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output(last_hidden_state=self.rows)


class TransformersModel(Model):
    """One rank's part of the model."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        world: World | None = None,
        communicator: Communicator | None = None,
        layers: range | None = None,
    ) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        world = world or World()
        self.step = Step()
        whole = prepare(spec.details, dtype, self.step)
        if world.tp_size > 1 and communicator is None:
            raise ValueError(f"{world.tp_size} ranks that share layers need a communicator")
        self.joint = Joint(Share(world.tp_rank, world.tp_size), communicator)
        alone = world.tp_size == 1 and world.pp_size == 1
        model = whole if alone else prepare(spec.details, dtype, self.step)
        self.names = CheckpointNames(whole)
        cuts = share_model(model, self.joint) if world.tp_size > 1 else {}
        if world.pp_size > 1:
            assert layers is not None, "a stage is told its layers"
            keep_stage(model, layers, self.step)
        self.is_first, self.is_last = world.is_first_stage, world.is_last_stage
        num_layers = spec.num_layers if layers is None else len(layers)
        with self.joint.alone():
            self.anatomy = look_into(model, num_layers)
        self._parameters = Parameters(model, whole, self.names, cuts)
        fill_buffers(model, device)
        self._take_apart(model, self.anatomy)

    def _take_apart(self, model: PreTrainedModel, anatomy: Anatomy) -> None:
        """Body and head, and a slot for each attention module."""
        self.body = model.get_submodule(anatomy.body)
        self._head_input = HeadInput(anatomy.output)
        model.set_submodule(anatomy.body, self._head_input)
        self.head = model
        self._slots = [Slot(call.layer, self.step) for call in anatomy.layers]
        for call, slot in zip(anatomy.layers, self._slots, strict=True):
            put_slot(call.module, slot)

    @classmethod
    def checkpoint_tensors(cls, spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        return CheckpointNames(prepare(spec.details, torch.float32, Step())).expected

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        return tuple(slot.layer for slot in self._slots)

    def parameters(self) -> dict[str, torch.Tensor]:
        """The tensors of this rank by name, each once."""
        return self._parameters.tensors()

    def load_weights(self, weights: Mapping[str, WeightHandle]) -> None:
        self._parameters.load(weights, self.dtype, self.device)
        for call, slot in zip(self.anatomy.layers, self._slots, strict=True):
            if (slopes := slot.layer.alibi_slopes) is not None:
                slot.layer = replace(slot.layer, alibi_slopes=slopes.to(self.device))
            if call.sinks is not None:
                slot.layer = replace(slot.layer, sinks=self._parameters.get(call.sinks).float())
        finish_linear(self.anatomy.called, self.dtype, self.device)
        check_rows(self)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        intermediate: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor | Mapping[str, torch.Tensor]:
        self.step.context, self.step.prompt_lens = context, context.prompt_lens
        try:
            hidden = self.run_body(input_ids, positions, intermediate)
        finally:
            self.step.context = self.step.prompt_lens = None
        return hidden if self.is_last else {"hidden": hidden}

    def run_body(
        self, input_ids: torch.Tensor, positions: torch.Tensor, intermediate: Mapping[str, torch.Tensor] | None
    ) -> torch.Tensor:
        """[T] ids and positions to [T, hidden_size]."""
        self.step.incoming = None if intermediate is None else intermediate["hidden"][None]
        try:
            out: Any = self.body(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            self.step.incoming = None
        hidden: torch.Tensor = out[0][0]
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.is_last, "the last stage has the head"
        ids = torch.zeros((1, hidden.shape[0]), dtype=torch.int64, device=hidden.device)
        self._head_input.rows = hidden[None]
        try:
            logits: torch.Tensor = self.head(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._head_input.rows = None
        return logits
