"""A model for engines of several ranks whose workers have no model: any number of ranks up to twelve that divides it is fine.

LLM("scripted", plugins={"ranked": RankedPlugin()}, executor={"name": "mp", "tensor_parallel_size": 2,
    "worker": "pegboard.testing.faulty_worker:FaultyWorker"})
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from pegboard.contracts.model import ModelSpec
from pegboard.contracts.model_source import ModelSource
from pegboard.plugins import ModelProvider, hookimpl
from pegboard.testing import scripted_model
from pegboard.testing.scripted_model import ScriptedPlugin


def spec_of(source: ModelSource) -> ModelSpec:
    return dataclasses.replace(scripted_model.spec_of(source), num_layers=12, num_heads=12, num_kv_heads=12)


class RankedPlugin(ScriptedPlugin):
    """``scripted``, as far as choosing parts goes. The real worker cannot run it."""

    @hookimpl
    def models(self) -> Iterable[ModelProvider]:
        yield ModelProvider(
            name="scripted",
            target="pegboard.testing.scripted_model:ScriptedModel",
            architectures=("ScriptedForCausalLM",),
            spec=f"{__name__}:spec_of",
            capabilities=frozenset({"tp", "pp"}),
        )
