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


HEAD_SHARE = 0.5
"""Of what its weights suggest, this much of the output head's cost counts when layers are spread over stages. The head of a 135M
model (49,152 ids, hidden size 576), with the weights of 8 layers, takes the time of so many on one thread:

=========================  =====  =====  =====  ===========
rows                           1     16     64  prefill 512
=========================  =====  =====  =====  ===========
bfloat16                     3.7    2.6    3.9          0.1
float32                      4.1    4.7    5.3          0.1
=========================  =====  =====  =====  ===========

The embedding counts nothing: rows are only looked up."""


def head_layers(spec: ModelSpec) -> float:
    """What the output head costs, in layers; 0 for a model that does not say what a layer weighs."""
    return HEAD_SHARE * spec.vocab_size * spec.hidden_size / spec.layer_weights if spec.layer_weights else 0.0


def stage_layers(num_layers: int, num_stages: int, split: Sequence[int] | None = None, head: float = 0.0) -> list[range]:
    """The layers of each stage, every layer in one of them: as many as ``split`` says, or so that the slowest stage is as fast as
    possible, the first stages then having more. ``head``: what the output head costs the last stage, in layers.

    Raises ``ValueError`` for more stages than layers, and for a ``split`` that is not one of these layers over these stages.
    """
    if num_stages > max(num_layers, 1):
        raise ValueError(f"{num_layers} layers are not enough for {num_stages} stages, which hold one at least")
    if split is None:
        split = _balanced(num_layers, num_stages, head)
    elif len(split) != num_stages:
        raise ValueError(f"{list(split)} splits the layers over {len(split)} stages, and there are {num_stages}")
    elif min(split) < 1 or sum(split) != num_layers:
        reason = f"it adds up to {sum(split)}" if min(split) > 0 else "a stage holds one at least"
        raise ValueError(f"{list(split)} does not split {num_layers} layers: {reason}")
    ends = list(accumulate(split))
    return [range(end - count, end) for end, count in zip(ends, split, strict=True)]


def _balanced(num_layers: int, num_stages: int, head: float) -> list[int]:
    """Each layer to the stage that has the least to do so far, the first of them; none stays without."""
    counts = [min(1, num_layers)] * num_stages
    costs = [*counts[1:], counts[-1] + head]
    for _ in range(num_layers - sum(counts)):
        stage = costs.index(min(costs))
        counts[stage] += 1
        costs[stage] += 1
    return counts


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
    ranks, rule = settings.tensor_parallel_size, _rule(model, "parallel", host)
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
    if stages > 1 and (reasons := _rule(model, "stages", host)(spec, stages)):
        message = f"{stages} stages cannot share the layers: {'; '.join(reasons)}"
        return [*problems, Problem("executor.pipeline_parallel_size", message, "set it to 1")]
    head = head_layers(spec)
    try:
        stage_layers(spec.num_layers, stages, settings.pipeline_split, head)
    except ValueError as error:
        usual = ", ".join(str(len(layers)) for layers in stage_layers(spec.num_layers, stages, head=head))
        problems.append(Problem("executor.pipeline_split", str(error), f"without it, the split is {usual}"))
    return problems


def _rule(model: Provider, name: str, host: PluginHost) -> Callable[[ModelSpec, int], list[str]]:
    """The model's own rule, ``parallel`` or ``stages``; without one, heads must divide and any stages will do."""
    path = getattr(model, name) if isinstance(model, ModelProvider) else ""
    if not path:
        return undivided_heads if name == "parallel" else lambda spec, stages: []

    def ask(spec: ModelSpec, ranks: int) -> list[str]:
        try:
            return list(import_target(path)(spec, ranks))
        except Exception as error:
            who = f"model {model.name!r} of {host.label(model)}"
            raise PluginError(f"{who}: {path} raised {type(error).__name__}: {error}") from error

    return ask


__all__ = ["head_layers", "parallel_problems", "stage_layers", "undivided", "undivided_heads"]
