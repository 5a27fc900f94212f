"""Whether tokens influence one another outside of attention, which would mix the requests of a step: tried with the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from pegboard_plugins.models.transformers.build import UnsupportedModel

if TYPE_CHECKING:
    from pegboard_plugins.models.transformers.model import TransformersModel

_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference, as a share of the largest number: products of other rows may be summed in another order."""


@torch.no_grad()
def check_rows(model: TransformersModel) -> None:
    """Compute one token at one position twice, at different places among other tokens at other positions, where attention lets
    each see itself alone. Raises ``UnsupportedModel`` if the results differ: a convolution or a recurrence, or positions that are
    counted instead of read."""
    size = model.spec.vocab_size
    token, position = size // 2, 3 % model.spec.max_model_len
    first = _row(model, [token, size // 3, size // 4], [position, 0, 1], 0)
    second = _row(model, [size // 5, size // 7, token], [1, position, position], 2)
    difference, largest = float((first - second).abs().max()), float(first.abs().max())
    if not difference <= _TOLERANCE[model.dtype] * max(largest, 1e-6):
        reason = (
            "a token's result depends on the tokens beside it, outside of attention, or on its place in the step: it differs by "
            f"{difference:.2g} of {largest:.2g}"
        )
        raise UnsupportedModel(model.spec.architecture, [reason])


def _row(model: TransformersModel, tokens: list[int], positions: list[int], row: int) -> torch.Tensor:
    ids, places = (torch.tensor(x, device=model.device) for x in (tokens, positions))
    width = model.spec.hidden_size
    blank = None if model.is_first else {"hidden": _noise(ids, width).to(model.device, model.dtype)}
    with model.joint.alone():
        return model.run_body(ids, places, blank)[row].float()


def _noise(ids: torch.Tensor, width: int) -> torch.Tensor:
    """[T, width] that depend on the token alone, for stages that have no embedding."""
    return torch.stack([torch.randn(width, generator=torch.Generator().manual_seed(int(token))) for token in ids])
