"""Wire types: everything that crosses a process boundary, as msgspec structs. Imports nothing else of the core."""

from pegboard.wire.engine_messages import EngineCoreOutput, EngineCoreOutputs, SchedulerStats
from pegboard.wire.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec, MemoryReport, World
from pegboard.wire.model_output import Logprobs, ModelRunnerOutput
from pegboard.wire.output_kind import OutputKind
from pegboard.wire.request import EngineCoreRequest, FinishReason
from pegboard.wire.sampling_params import SamplingParams
from pegboard.wire.scheduler_output import PLACEHOLDER_TOKEN, GrammarOutput, NewRequestData, SchedulerOutput
from pegboard.wire.structured_outputs import GrammarKind, GrammarSpec, StructuredOutputs

__all__ = [
    "PLACEHOLDER_TOKEN",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "FinishReason",
    "GrammarKind",
    "GrammarOutput",
    "GrammarSpec",
    "KVCacheConfig",
    "KVCacheGroup",
    "KVCacheSpec",
    "Logprobs",
    "MemoryReport",
    "ModelRunnerOutput",
    "NewRequestData",
    "OutputKind",
    "SamplingParams",
    "SchedulerOutput",
    "SchedulerStats",
    "StructuredOutputs",
    "World",
]
