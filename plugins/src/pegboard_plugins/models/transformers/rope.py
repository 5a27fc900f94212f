"""Rotary frequencies that depend on the length of the prompt (dynamic NTK, LongRoPE), token by token.

transformers sets them anew for a whole step, from the longest sequence in it. Here requests of any length share a step.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from pegboard_plugins.layers.rope_frequencies import frequencies_at_length
from pegboard_plugins.layers.rope_parameters import rope_parameters
from pegboard_plugins.models.transformers.attention import Step
from pegboard_plugins.models.transformers.build import UnsupportedModel

BY_LENGTH: Final = ("dynamic", "longrope")


def depends_on_length(model: PreTrainedModel) -> bool:
    return any(_by_length(module) for module in model.modules())


def rope_by_prompt(model: PreTrainedModel, step: Step) -> None:
    """Change the rotary modules of such types in place. Raises ``UnsupportedModel`` where a model computes them in a way of its
    own."""
    for module in model.modules():
        if _by_length(module):
            _change(model, module, step)


def _by_length(module: torch.nn.Module) -> bool:
    kind = getattr(module, "rope_type", None)
    return any(k in BY_LENGTH for k in (kind.values() if isinstance(kind, dict) else [kind]))


def _change(model: PreTrainedModel, module: torch.nn.Module, step: Step) -> None:
    config, name = model.config.get_text_config(), type(model).__name__
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    plain = inspect.unwrap(type(module).forward)  # without what sets frequencies for a whole step
    try:
        parameters = rope_parameters(config.to_dict(), head_size, f"configuration of {name}")
    except ValueError as error:
        raise UnsupportedModel(name, [str(error)]) from error
    own = module._buffers.get("inv_freq")
    if own is None or tuple(own.shape) != (parameters.rotary_dim // 2,):
        raise UnsupportedModel(
            name, [f"its rotary frequencies of type {parameters.rope_type!r} are computed in a way of its own"]
        )

    def forward(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        lengths = position_ids[0] + 1
        if step.prompt_lens is not None:
            lengths = torch.maximum(lengths, step.prompt_lens)
        kept = module._buffers["inv_freq"]
        module._buffers["inv_freq"] = frequencies_at_length(parameters, lengths)
        try:
            return plain(module, x, position_ids, *args, **kwargs)
        finally:
            module._buffers["inv_freq"] = kept

    module.forward = forward  # type: ignore[method-assign]
