"""Reads the parameters of a transformers model, or of one rank's part of it, from a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist

from pegboard.contracts.weight_loader import WeightHandle
from pegboard_plugins.models.transformers.checkpoint import CheckpointNames, Origin
from pegboard_plugins.models.transformers.sharing import Cut
from pegboard_plugins.models.weights import ParameterReader, warn_of_differing_head


class Parameters:
    """The parameters of ``model`` that are this rank's, by name, with the modules that own them.

    ``names`` is of the whole model, ``cuts`` says which part of a parameter is this rank's. Where a model keeps some
    parameters in float32 whatever it computes in, so does this.
    """

    def __init__(self, model: PreTrainedModel, whole: PreTrainedModel, names: CheckpointNames, cuts: Mapping[str, Cut]) -> None:
        self._owners = dict(_owned(model))
        self._whole, self._names, self._cuts = whole, names, cuts
        self._wide = tuple(model._get_dtype_plan(model.dtype))

    def load(self, weights: Mapping[str, WeightHandle], dtype: torch.dtype, device: torch.device) -> None:
        """Set each of them once. Raises ``WeightsError`` before anything is read if a name or shape does not fit."""
        origins = self._names.origins(weights)
        reader = ParameterReader(weights, dtype, device)
        tied = {**self._names.tied, **{source: target for target, source in self._names.tied.items() if source not in origins}}
        own = [name for name in self._owners if name in origins]
        for first, names in _by_origin(own, origins):
            for name, tensor in self._read(origins[first], names, reader).items():
                self._set(name, tensor)
        for name in self._owners:
            if name in tied and name not in origins and tied[name] in origins:
                self._tie(name, tied[name], origins, reader)
        self._untie_not(origins)
        reader.log_casts()

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name; a tensor that is tied is listed once."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for name, (module, key) in self._owners.items():
            tensor = _get(module, key)
            found.setdefault(id(tensor), (name, tensor))
        return dict(found.values())

    def get(self, name: str) -> torch.Tensor:
        return _get(*self._owners[name])

    def _tie(self, name: str, source: str, origins: Mapping[str, Origin], reader: ParameterReader) -> None:
        if source in self._owners and self._cuts.get(name) == self._cuts.get(source):
            self._set(name, self.get(source))
        else:  # this rank has another part of the one than of the other
            self._set(name, next(iter(self._read(origins[source], [name], reader, source).values())))

    def _untie_not(self, origins: Mapping[str, Origin]) -> None:
        """A checkpoint may hold a parameter twice although its configuration ties the two."""
        for target, source in self._names.tied.items():
            if not {target, source} <= origins.keys() & self._owners.keys() or self._cuts.get(target) != self._cuts.get(source):
                continue
            if torch.equal(self.get(target), self.get(source)):
                self._set(target, self.get(source))
            else:
                warn_of_differing_head()

    def _read(self, origin: Origin, names: list[str], reader: ParameterReader, source: str = "") -> dict[str, torch.Tensor]:
        """Parameters in memory of their own. ``source``: the parameter that is read for the one in ``names``."""
        if origin.converter is None:
            (name,) = names
            return {name: self._copy(name, _pieces(reader, origin.names[0], self._cuts.get(name)), reader)}
        cut = self._cuts.get(names[0])
        cuts = None if cut is None or len(names) > 1 else _source_cuts(origin, cut)
        if cuts is not None:
            cut_of = {name: cuts[pattern] for pattern, found in origin.sources.items() for name in found}
            parts = {name: torch.cat(list(_pieces(reader, name, own)), own.dim) for name, own in cut_of.items()}
            made = origin.convert(names[0], parts, self._whole)
            return {names[0]: self._copy(names[0], iter([made[names[0]]]), reader)}
        parts = {name: next(_pieces(reader, name, None)) for name in origin.names}
        first = source or names[0]
        made = origin.convert(first, parts, self._whole)
        return {name: self._copy(name, _cut_pieces(made[source or name], self._cuts.get(name)), reader) for name in names}

    def _copy(self, name: str, pieces: Iterator[torch.Tensor], reader: ParameterReader) -> torch.Tensor:
        module, key = self._owners[name]
        blank, cut = _get(module, key), self._cuts.get(name)
        dtype = reader.dtype if blank.is_floating_point() else blank.dtype
        if any(pattern in name for pattern in self._wide):
            dtype = torch.float32
        filled = torch.empty(blank.shape, dtype=dtype, device=reader.device)
        start = 0
        for piece in pieces:
            if cut is None:
                filled.copy_(piece)
                continue
            length = piece.shape[cut.dim]
            filled.narrow(cut.dim, start, length).copy_(piece)
            start += length
        if cut is not None:
            filled.narrow(cut.dim, start, cut.size - start).zero_()
        return filled

    def _set(self, name: str, tensor: torch.Tensor) -> None:
        module, key = self._owners[name]
        if key in module._buffers:
            module._buffers[key] = tensor
        else:
            module._parameters[key] = torch.nn.Parameter(tensor, requires_grad=False) if not _is_parameter(tensor) else tensor  # type: ignore[assignment]


def _owned(model: PreTrainedModel) -> Iterator[tuple[str, tuple[torch.nn.Module, str]]]:
    """Every parameter and persistent buffer, under all of its names."""
    for path, module in model.named_modules(remove_duplicate=False):
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and key not in module._non_persistent_buffers_set:
                yield (f"{path}.{key}" if path else key), (module, key)


def _get(module: torch.nn.Module, key: str) -> torch.Tensor:
    tensor: torch.Tensor = getattr(module, key)
    return tensor


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def _by_origin(names: list[str], origins: Mapping[str, Origin]) -> Iterator[tuple[str, list[str]]]:
    """Parameters that are made together, with the first of each group."""
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(id(origins[name]), []).append(name)
    for group in groups.values():
        yield group[0], group


def _pieces(reader: ParameterReader, name: str, cut: Cut | None) -> Iterator[torch.Tensor]:
    """A stored tensor, or the spans of it that ``cut`` says."""
    handle = reader.weights[name]
    if cut is None:
        stored = handle.read()
        if stored.is_floating_point():
            reader.check_cast(name, stored)
        yield stored
        return
    for span in cut.spans:
        if span.length:
            stored = handle.read_slice(cut.dim, span.start, span.length)
            reader.check_cast(name, stored)
            yield stored


def _cut_pieces(tensor: torch.Tensor, cut: Cut | None) -> Iterator[torch.Tensor]:
    if cut is None:
        yield tensor
        return
    for span in cut.spans:
        yield tensor.narrow(cut.dim, span.start, span.length)


def _source_cuts(origin: Origin, cut: Cut) -> dict[str, Cut] | None:
    """What to read of each source, by pattern, so that converting gives this rank's part: for experts, which are stacked, and
    whose gate and up are joined besides. None where the whole has to be converted first."""
    operations = origin.converter.operations if origin.converter is not None else []
    kinds = [type(operation) for operation in operations]
    patterns = list(origin.sources)
    if kinds == [MergeModulelist] and operations[0].dim == 0 and cut.dim > 0 and len(patterns) == 1:
        return {patterns[0]: Cut(cut.dim - 1, cut.spans, cut.size)}
    if kinds != [MergeModulelist, Concatenate] or operations[0].dim != 0 or cut.dim < 1:
        return None
    if cut.dim != operations[1].dim:
        return {pattern: Cut(cut.dim - 1, cut.spans, cut.size) for pattern in patterns}
    if len(cut.spans) != len(patterns):
        return None
    first, each = cut.spans[0], cut.size // len(patterns)
    return {pattern: Cut(cut.dim - 1, (first,), each) for pattern in patterns}
