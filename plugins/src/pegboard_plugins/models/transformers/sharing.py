"""Tensor parallelism by transformers' own plan of a model: which rank holds what of each parameter, and where sums are made.

A plan names a style for modules and parameters. transformers carries it out with distributed tensors; here each rank has plain
parameters of its part's size, and the modules that need it get a forward that exchanges through the engine's communicator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from pegboard.contracts.communicator import Communicator
from pegboard_plugins.layers.sharing import Share, Span
from pegboard_plugins.models.transformers.linear import EngineLinear

WITHOUT_EFFECT: Final = frozenset({"replicate", "replicated_with_grad_allreduce", "local_params", "mla_kv_a_proj"})
"""Styles that matter to gradients only, or to distributed tensors."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a parameter: ``spans`` along ``dim``, one after the other, and zeros up to ``size``."""

    dim: int
    spans: tuple[Span, ...]
    size: int

    @classmethod
    def evenly(cls, dim: int, count: int, share: Share, pieces: int = 1) -> Cut:
        """``pieces``: of a parameter that is several joined along ``dim``, each of which is shared."""
        each = share.evenly(count // pieces)
        spans = tuple(Span(piece * (count // pieces) + each.start, each.length) for piece in range(pieces))
        return cls(dim, spans, each.length * pieces)

    @classmethod
    def padded(cls, dim: int, count: int, share: Share) -> Cut:
        return cls(dim, (share.up_to(count),), share.padded(count))

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return (*whole[: self.dim], self.size, *whole[self.dim + 1 :])


class Joint:
    """What the ranks of a stage do together. Without a communicator this rank runs alone."""

    def __init__(self, share: Share, communicator: Communicator | None = None) -> None:
        self.share, self._communicator = share, communicator
        self._alone = communicator is None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Only this rank runs: results have the right shape, but mean nothing."""
        before, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = before

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._alone or self._communicator is None:
            return tensor
        return self._communicator.all_reduce(tensor.contiguous())

    def gather(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        """Along the last dimension, which has ``size`` numbers in all."""
        if self._alone or self._communicator is None:
            return torch.cat([tensor] * self.share.size, -1)[..., :size]
        return self._communicator.all_gather(tensor.contiguous(), -1)[..., :size]


def planned(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Module, str, str]]:
    """What the plan covers: its name, the module (for a parameter its owner), the parameter's key or "", and the style."""
    plan = dict(model._tp_plan or {})
    for path, module in model.named_modules():
        for key in ("", *module._parameters):
            name = ".".join(part for part in (path, key) if part)
            style = plan.get(_generic(name))
            if style is not None and style not in WITHOUT_EFFECT:
                yield name, module, key, style


def share_model(model: PreTrainedModel, joint: Joint) -> dict[str, Cut]:
    """Cut ``model``, which is on the meta device, to this rank's part. Returns the cuts by parameter.

    Raises ``ValueError`` for a style or a module that this does not know, and for sizes that do not divide.
    """
    cuts: dict[str, Cut] = {}
    for name, module, key, style in list(planned(model)):
        if key:
            cuts[name] = _cut_parameter(module, key, style, joint.share, name)
            continue
        apply = _MODULE_STYLES.get(style)
        if apply is None:
            raise ValueError(f"transformers' plan shares {name} in the style {style!r}, which is not known here")
        for own, cut in apply(module, joint, name).items():
            cuts[f"{name}.{own}"] = cut
    return cuts


def _cut_parameter(module: torch.nn.Module, key: str, style: str, share: Share, name: str) -> Cut:
    dims = module._parameters[key].ndim  # type: ignore[union-attr]
    outputs = max(dims - 2, 0)
    where = {"colwise": (outputs, 1), "packed_colwise": (outputs, 2), "rowwise": (dims - 1, 1), "packed_rowwise": (dims - 1, 2)}
    if style not in where:
        raise ValueError(f"transformers' plan shares the parameter {name} in the style {style!r}, which is not known here")
    dim, pieces = where[style]
    return _resize(module, key, Cut.evenly(dim, module._parameters[key].shape[dim], share, pieces))  # type: ignore[union-attr]


def _resize(module: torch.nn.Module, key: str, cut: Cut) -> Cut:
    whole = module._parameters[key]
    assert whole is not None
    part = torch.empty(cut.shape(tuple(whole.shape)), dtype=whole.dtype, device="meta")
    module._parameters[key] = torch.nn.Parameter(part, requires_grad=False)
    return cut


def _linear(module: torch.nn.Module, name: str) -> EngineLinear:
    if not isinstance(module, EngineLinear):
        raise ValueError(f"transformers' plan shares {name}, a {type(module).__name__}, like a linear layer")
    return module


def _colwise(module: torch.nn.Module, joint: Joint, name: str, pieces: int = 1) -> dict[str, Cut]:
    linear = _linear(module, name)
    cut = Cut.evenly(0, linear.out_features, joint.share, pieces)
    linear.out_features = cut.size
    return {key: _resize(linear, key, cut) for key in ("weight", "bias") if linear._parameters.get(key) is not None}


def _packed_colwise(module: torch.nn.Module, joint: Joint, name: str) -> dict[str, Cut]:
    return _colwise(module, joint, name, pieces=2)


def _colwise_gathered(module: torch.nn.Module, joint: Joint, name: str) -> dict[str, Cut]:
    linear, size = _linear(module, name), module.out_features
    assert isinstance(size, int)
    cut = Cut.padded(0, size, joint.share)
    plain = linear.forward
    _set_forward(linear, lambda x: joint.gather(plain(x), size))
    return {key: _resize(linear, key, cut) for key in ("weight", "bias") if linear._parameters.get(key) is not None}


def _rowwise(module: torch.nn.Module, joint: Joint, name: str) -> dict[str, Cut]:
    linear = _linear(module, name)
    cut = Cut.evenly(1, linear.in_features, joint.share)
    linear.in_features = cut.size
    _set_forward(linear, lambda x: _summed(linear, x, joint))
    return {"weight": _resize(linear, "weight", cut)}


def _rowwise_split(module: torch.nn.Module, joint: Joint, name: str) -> dict[str, Cut]:
    linear = _linear(module, name)
    span = joint.share.up_to(linear.in_features)
    linear.in_features = span.length
    _set_forward(linear, lambda x: _summed(linear, x[..., span.start : span.start + span.length], joint))
    return {"weight": _resize(linear, "weight", Cut(1, (span,), span.length))}


def _summed(linear: EngineLinear, x: torch.Tensor, joint: Joint) -> torch.Tensor:
    total = joint.sum(linear.product(x, None))
    return total if linear.bias is None else total + linear.bias


def _embedding(module: torch.nn.Module, joint: Joint, name: str) -> dict[str, Cut]:
    """Each rank looks up its own ids; the others add zeros."""
    if not isinstance(module, torch.nn.Embedding):
        raise ValueError(f"transformers' plan shares {name}, a {type(module).__name__}, like an embedding")
    cut, lookup = Cut.padded(0, module.num_embeddings, joint.share), module.forward
    module.padding_idx, module.num_embeddings = None, cut.size
    first = joint.share.rank * cut.size

    def forward(ids: torch.Tensor) -> torch.Tensor:
        rows = ids - first
        elsewhere = (rows < 0) | (rows >= cut.size)
        found = lookup(rows.masked_fill(elsewhere, 0))
        return joint.sum(found.masked_fill(elsewhere[..., None], 0.0))

    _set_forward(module, forward)
    return {"weight": _resize(module, "weight", cut)}


def _sum_output(module: torch.nn.Module, joint: Joint, name: str) -> dict[str, Cut]:
    """Such as a module of experts, each of which this rank has a part of."""
    plain = module.forward
    _set_forward(module, lambda *args, **kwargs: joint.sum(plain(*args, **kwargs)))
    return {}


def _divide_input(module: torch.nn.Module, joint: Joint, name: str) -> dict[str, Cut]:
    """Of what every rank computes in full inside of a sum."""
    plain = module.forward
    _set_forward(module, lambda x, *args, **kwargs: plain(x / joint.share.size, *args, **kwargs))
    return {}


def _set_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = forward  # type: ignore[method-assign]


_MODULE_STYLES: Final[dict[str, Callable[[torch.nn.Module, Joint, str], dict[str, Cut]]]] = {
    "colwise": _colwise,
    "packed_colwise": _packed_colwise,
    "colwise_gather_output": _colwise_gathered,
    "colwise_rep": _colwise_gathered,
    "rowwise": _rowwise,
    "rowwise_split_input": _rowwise_split,
    "rowwise_rep": _rowwise_split,
    "embedding_rowwise": _embedding,
    "all_reduce": _sum_output,
    "moe_tp_experts": _sum_output,
    "moe_identity_expert": _divide_input,
}


@dataclass(frozen=True, slots=True)
class SharingTerms:
    """``reasons``: what is in the way of sharing a model at all. ``sizes``: what the number of ranks must divide, by name;
    ``heads``: whether attention heads are among it."""

    reasons: list[str]
    sizes: dict[str, int]
    heads: bool


def sharing_terms(model: PreTrainedModel, attention: frozenset[str]) -> SharingTerms:
    """By transformers' plan of ``model``. ``attention``: paths of its attention modules."""
    name = type(model).__name__
    if not any("*" in pattern for pattern in model._tp_plan or {}):
        return SharingTerms([f"transformers has no plan for sharing the layers of {name}"], {}, False)
    reasons: list[str] = []
    sizes: dict[str, int] = {}
    heads = False
    for path, module, key, style in planned(model):
        generic = _generic(path)
        if key:
            parameter = module._parameters[key]
            assert parameter is not None
            sizes[generic] = parameter.shape[-1 if "rowwise" in style else max(parameter.ndim - 2, 0)]
        elif style not in _MODULE_STYLES:
            reasons.append(f"transformers' plan for {name} has the style {style!r}, which is not known here")
        elif style in ("colwise", "packed_colwise", "rowwise") and isinstance(module, torch.nn.Linear):
            if any(path.startswith(f"{owner}.") for owner in attention):
                heads = True
            else:
                sizes[generic] = module.in_features if style == "rowwise" else module.out_features
    return SharingTerms(list(dict.fromkeys(reasons)), sizes, heads)


def _generic(name: str) -> str:
    """The name in a plan: numbers of layers are stars."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
