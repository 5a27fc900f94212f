"""Which tensors of a checkpoint make up which parameter of a transformers model: names, conversions and checks. Reads nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from pegboard.contracts.weight_loader import WeightHandle, WeightsError
from pegboard_plugins.models.weights import HARMLESS, listed, logger, shortened

Shape = tuple[int, ...]


@dataclass(slots=True)
class Origin:
    """Where parameters come from: one tensor as it is, or what ``converter`` makes of the tensors that match its patterns.

    ``sources``: pattern to names of tensors, in order; without a converter one name under its own.
    """

    converter: WeightConverter | None
    sources: dict[str, list[str]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]

    def convert(self, target: str, tensors: Mapping[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Parameters by name, made of ``tensors`` by name; ``target`` is the first of them."""
        assert self.converter is not None
        converter = deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names:
                converter.add_tensor(target, name, pattern, tensors[name])
        made = converter.convert(target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class CheckpointNames:
    """``model``: the whole one, on the meta device.

    ``expected``: names and shapes of the tensors that transformers would write; it reads older names too.
    ``tied``: parameters that a checkpoint need not have, to those that they are the same as.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._state = dict(model.state_dict())
        self.tied: dict[str, str] = dict(model.all_tied_weights_keys)
        conversions = get_model_conversion_mapping(model)
        self._renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        self._converters = [c for c in conversions if isinstance(c, WeightConverter)]
        self._by_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}
        untied = {name: tensor for name, tensor in self._state.items() if name not in self.tied}
        written = revert_weight_conversion(model, untied)
        self.expected: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in written.items()}

    def origins(self, weights: Mapping[str, WeightHandle]) -> dict[str, Origin]:
        """Where each parameter comes from; those of one converter share it. Raises ``WeightsError`` listing all problems."""
        found, unknown = self._collect(weights)
        wanted = self._collect(self.expected)[0]
        missing, wrong = self._missing(found, wanted, weights), self._wrong(found, weights)
        twice = [" and ".join(origin.names) for origin in found.values() if origin.converter is None and len(origin.names) > 1]
        origins: dict[str, Origin] = {}
        if not wrong and not missing and not twice:
            for target, origin in found.items():
                made = self._shapes(target, origin, weights)
                wrong += self._misfits(made, origin)
                origins.update(dict.fromkeys(made, origin))
        if missing or wrong or twice:
            problems = [*listed("missing", missing), *listed("wrong shape", wrong), *listed("given twice", twice)]
            raise WeightsError(f"the checkpoint does not fit transformers' {self._name}: {'; '.join(problems)}")
        self._warn(unknown)
        return origins

    @property
    def _name(self) -> str:
        return type(self._model).__name__

    def _collect(self, names: Iterable[str]) -> tuple[dict[str, Origin], list[str]]:
        """Parameter to origin (under the first parameter that a converter makes), and names that are none of the model's."""
        prefix = self._model.base_model_prefix
        found: dict[str, Origin] = {}
        unknown = []
        for name in sorted(names, key=dot_natural_key):
            target, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self._state)
            if target not in self._state and name in self._state:
                target, pattern = rename_source_key(name, [], [], prefix, self._state)
            if target not in self._state:
                unknown.append(name)
                continue
            converter = None if pattern is None else self._by_pattern[pattern]
            origin = found.setdefault(target, Origin(converter))
            origin.sources.setdefault(pattern or name, []).append(name)
        return found, unknown

    def _missing(self, found: Mapping[str, Origin], wanted: Mapping[str, Origin], names: Iterable[str]) -> list[str]:
        """Tensors by the names that transformers would write, with shapes."""
        given, lacking = set(names), []
        others: dict[str, set[str]] = {}
        for target, source in self.tied.items():
            others.setdefault(source, set()).add(target)
        ignored = [re.compile(p) for p in self._model._keys_to_ignore_on_load_missing or ()]
        for target, origin in wanted.items():
            own = found.get(target)
            if own is None and (others.get(target, set()) & found.keys() or any(p.search(target) for p in ignored)):
                continue
            if own is None:
                lacking += origin.names
            elif own.converter is not None and _count(own) != _count(origin):
                lacking += [name for name in origin.names if name not in given]
        return [f"{name} {list(self.expected[name])}" for name in lacking]

    def _wrong(self, found: Mapping[str, Origin], weights: Mapping[str, WeightHandle]) -> list[str]:
        """Tensors under the names that transformers would write, in another shape."""
        return [
            f"{name} {list(self.expected[name])}, found {list(weights[name].shape)}"
            for origin in found.values()
            for name in origin.names
            if name in self.expected and tuple(weights[name].shape) != self.expected[name]
        ]

    def _shapes(self, target: str, origin: Origin, weights: Mapping[str, WeightHandle]) -> dict[str, Shape]:
        """Of the parameters that come from ``origin``."""
        if origin.converter is None:
            return {target: tuple(weights[origin.names[0]].shape)}
        blank = {name: torch.empty(weights[name].shape, device="meta") for name in origin.names}
        try:
            made = origin.convert(target, blank, self._model)
        except Exception as error:  # of a conversion that does not fit
            raise WeightsError(f"{shortened(origin.names)} cannot be made into {target} of {self._name}: {error}") from error
        return {name: tuple(tensor.shape) for name, tensor in made.items()}

    def _misfits(self, made: Mapping[str, Shape], origin: Origin) -> list[str]:
        return [
            f"{name} {list(self._state[name].shape)}, found {list(shape)} in {shortened(origin.names)}"
            for name, shape in made.items()
            if name in self._state and tuple(self._state[name].shape) != shape
        ]

    def _warn(self, unknown: list[str]) -> None:
        ignored = [HARMLESS, *(re.compile(p) for p in self._model._keys_to_ignore_on_load_unexpected or ())]
        told = [name for name in unknown if not any(p.search(name) for p in ignored)]
        if told:
            logger.warning("ignored %d tensors that the model does not use: %s", len(told), shortened(told))


def _count(origin: Origin) -> Counter[str]:
    return Counter({pattern: len(names) for pattern, names in origin.sources.items()})
