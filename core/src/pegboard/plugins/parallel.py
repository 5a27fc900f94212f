"""How ranks share a model: which layers a pipeline stage holds, and what keeps a number of ranks from sharing. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from pegboard.contracts.model import ModelSpec
from pegboard.plugins.errors import PluginError
from pegboard.plugins.provider import ModelProvider, Problem, Provider, import_target

if TYPE_CHECKING:
    from pegboard.config import EngineConfig
    from pegboard.plugins.host import PluginHost


def stage_layers(num_layers: int, num_stages: int, split: Sequence[int] | None = None) -> list[range]:
    """The layers of each stage, every layer in one of them: as many as ``split`` says, or as evenly as possible, the first
    stages then having one more than the last, which has the output head too.

    Raises ``ValueError`` for more stages than layers, and for a ``split`` that is not one of these layers over these stages.
    """
    if num_stages > max(num_layers, 1):
        raise ValueError(f"{num_layers} layers are not enough for {num_stages} stages, which hold one at least")
    if split is None:
        fewest, more = divmod(num_layers, num_stages)
        split = [fewest + (stage < more) for stage in range(num_stages)]
    elif len(split) != num_stages:
        raise ValueError(f"{list(split)} splits the layers over {len(split)} stages, and there are {num_stages}")
    elif min(split) < 1 or sum(split) != num_layers:
        reason = f"it adds up to {sum(split)}" if min(split) > 0 else "a stage holds one at least"
        raise ValueError(f"{list(split)} does not split {num_layers} layers: {reason}")
    ends = list(accumulate(split))
    return [range(end - count, end) for end, count in zip(ends, split, strict=True)]


def undivided_heads(spec: ModelSpec, ranks: int) -> list[str]:
    """What keeps ``ranks`` from sharing the heads of a layer. Where there are fewer key heads than ranks, several ranks hold the
    same one."""
    problems = undivided({"num_attention_heads": spec.num_heads}, ranks)
    key_heads = spec.num_kv_heads
    if key_heads % ranks and ranks % key_heads:
        problems.append(f"num_key_value_heads is {key_heads}, and neither of {key_heads} and {ranks} divides the other")
    return problems


def undivided(sizes: dict[str, int], ranks: int) -> list[str]:
    """One line for each of ``sizes``, by name, that is no multiple of ``ranks``."""
    return [f"{name} is {size}, which {ranks} does not divide" for name, size in sizes.items() if size % ranks]


def parallel_problems(config: EngineConfig, spec: ModelSpec, model: Provider, host: PluginHost) -> list[Problem]:
    """What is wrong with the numbers of ranks and stages for this model, if it can be shared at all. Raises ``PluginError`` where
    the model's rule fails."""
    settings, problems = config.executor, []
    ranks, rule = settings.tensor_parallel_size, _rule(model, host)
    if ranks > 1 and "tp" in model.capabilities and (reasons := rule(spec, ranks)):
        working = [n for n in range(1, spec.num_heads + 1) if n == 1 or not rule(spec, n)]
        message = f"{ranks} ranks cannot share a layer: {'; '.join(reasons)}"
        remedy = f"numbers that work for this model: {', '.join(map(str, working))}"
        problems.append(Problem("executor.tensor_parallel_size", message, remedy))
    stages = settings.pipeline_parallel_size
    if "pp" not in model.capabilities and stages > 1:
        return problems
    if stages > max(spec.num_layers, 1):
        message = f"{stages} stages need as many layers, and the model has {spec.num_layers}"
        return [*problems, Problem("executor.pipeline_parallel_size", message, "lower it")]
    try:
        stage_layers(spec.num_layers, stages, settings.pipeline_split)
    except ValueError as error:
        usual = ", ".join(str(len(layers)) for layers in stage_layers(spec.num_layers, stages))
        problems.append(Problem("executor.pipeline_split", str(error), f"without it, the split is {usual}"))
    return problems


def _rule(model: Provider, host: PluginHost) -> Callable[[ModelSpec, int], list[str]]:
    """The model's own rule, or the one for heads alone."""
    path = model.parallel if isinstance(model, ModelProvider) else ""
    if not path:
        return undivided_heads

    def ask(spec: ModelSpec, ranks: int) -> list[str]:
        try:
            return list(import_target(path)(spec, ranks))
        except Exception as error:
            who = f"model {model.name!r} of {host.label(model)}"
            raise PluginError(f"{who}: {path} raised {type(error).__name__}: {error}") from error

    return ask


__all__ = ["parallel_problems", "stage_layers", "undivided", "undivided_heads"]
