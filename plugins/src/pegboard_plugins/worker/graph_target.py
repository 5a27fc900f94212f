"""What a worker gives its graph runner to capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pegboard.config import EngineConfig
from pegboard.contracts.communicator import Communicator
from pegboard.contracts.graph_runner import ForwardInputs, GraphTarget
from pegboard.contracts.model import ForwardContext, ModelSpec
from pegboard.contracts.worker import WorkerExtension
from pegboard_plugins.worker.attention_groups import by_layer
from pegboard_plugins.worker.links import Intermediate
from pegboard_plugins.worker.model_runner import ModelRunner


def graph_target(
    runner: ModelRunner,
    caches: Mapping[str, torch.Tensor],
    config: EngineConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    communicator: Communicator | None,
    extensions: Mapping[str, WorkerExtension],
) -> GraphTarget:
    """The model's forward on ``caches``: the real ones, or some for a trial. It keeps model and caches alive."""
    model, groups = runner.model, runner.groups

    def forward(inputs: ForwardInputs, metadata: Sequence[Any]) -> torch.Tensor | Intermediate:
        context = ForwardContext(by_layer(groups, metadata), caches, inputs.prompt_lens)
        return model.forward(inputs.input_ids, inputs.positions, context, inputs.intermediate)

    batch = runner.batch
    return GraphTarget(
        forward=forward,
        model=model,
        backends=runner.backends,
        device=runner.device,
        dtype=dtype,
        max_rows=min(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens),
        max_blocks=[-(-(batch.max_model_len + 1) // batch.block_size)] * len(groups),
        prompt_lens=spec.prompt_length_rope,
        widths={} if runner.stage.is_first else model.intermediate_widths(spec),
        communicator=communicator,
        extensions=extensions,
    )
