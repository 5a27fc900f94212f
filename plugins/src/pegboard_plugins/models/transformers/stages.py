"""Pipeline stages of a transformers model, where it has a plan for them: embedding, then layers, then norm and head."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from pegboard_plugins.models.transformers.attention import Step


class Passed(torch.nn.Module):
    """In the place of a module of another stage: gives back what it gets."""

    def __init__(self, other: torch.nn.Module) -> None:
        super().__init__()
        if hasattr(other, "attention_type"):  # some models ask a layer for it
            self.attention_type = other.attention_type

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


class Blank(torch.nn.Module):
    """In the place of the embedding on later stages: its output is replaced before the first own layer."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._width, self._dtype = width, dtype

    def forward(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros((*input_ids.shape, self._width), dtype=self._dtype, device=input_ids.device)


class StagePlan:
    """transformers' plan, read: the modules before the layers, the list of layers, and the modules after them, by path."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.first: list[str] = []
        self.layers: list[str] = []
        self.last: list[str] = []
        for path, (inputs, _outputs) in (model._pp_plan or {}).items():
            after = "hidden_states" in inputs
            (self.layers if "attention_mask" in inputs else self.last if after else self.first).append(path)

    def problems(self, model: PreTrainedModel, num_layers: int, hidden_size: int) -> list[str]:
        """What keeps stages from sharing ``model``."""
        name = type(model).__name__
        if len(self.layers) != 1:
            return [f"transformers has no plan for pipeline stages of {name}"]
        covered = tuple(f"{path}." for path in (*self.first, *self.layers, *self.last))
        outside = [n for n, _ in model.named_parameters() if not n.startswith(covered)]
        reasons = []
        if outside:
            reasons.append(f"transformers' plan for pipeline stages of {name} does not say where {outside[0]} belongs")
        if len(model.get_submodule(self.layers[0])) != num_layers or model.config.get_text_config().hidden_size != hidden_size:  # type: ignore[arg-type]
            reasons.append(f"the layers of {name} are not one list with hidden states of one width")
        return reasons


def keep_stage(model: PreTrainedModel, layers: range, step: Step) -> None:
    """Leave this stage's modules in ``model``, which is on the meta device. Others stay as names without parameters."""
    plan = StagePlan(model)
    stack = model.get_submodule(plan.layers[0])
    assert isinstance(stack, torch.nn.ModuleList)
    count, width, dtype = len(stack), model.config.get_text_config().hidden_size, model.dtype
    for index in range(count):
        if index not in layers:
            stack[index] = Passed(stack[index])
    if layers.start > 0:
        for path in plan.first:
            module = model.get_submodule(path)
            model.set_submodule(path, Blank(width, dtype) if isinstance(module, torch.nn.Embedding) else Passed(module))
        stack[layers.start].register_forward_pre_hook(_entry(step), with_kwargs=True)
    if layers.stop < count:
        for path in plan.last:
            model.set_submodule(path, Passed(model.get_submodule(path)))


def _entry(step: Step) -> Any:
    """Gives the first layer of a stage what the stage before has computed."""

    def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if step.incoming is None:
            return args, kwargs
        if args:
            return (step.incoming, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": step.incoming}

    return enter
