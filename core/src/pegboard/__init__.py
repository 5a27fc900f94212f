"""Pegboard: an LLM inference engine in which every part is a plugin.

Names are imported when first used, so that ``import pegboard`` stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "LLM": "pegboard.entrypoints.llm",
    "LLMEngine": "pegboard.engine.llm_engine",
    "SamplingParams": "pegboard.wire.sampling_params",
    "StructuredOutputs": "pegboard.wire.structured_outputs",
    "OutputKind": "pegboard.wire.output_kind",
    "EngineConfig": "pegboard.config",
    "RequestOutput": "pegboard.engine.outputs",
    "CompletionOutput": "pegboard.engine.outputs",
    "EngineDeadError": "pegboard.engine.errors",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "EngineDeadError",
    "LLMEngine",
    "OutputKind",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]

if TYPE_CHECKING:
    from pegboard.config import EngineConfig
    from pegboard.engine.errors import EngineDeadError
    from pegboard.engine.llm_engine import LLMEngine
    from pegboard.engine.outputs import CompletionOutput, RequestOutput
    from pegboard.entrypoints.llm import LLM
    from pegboard.wire.output_kind import OutputKind
    from pegboard.wire.sampling_params import SamplingParams
    from pegboard.wire.structured_outputs import StructuredOutputs


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'pegboard' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
