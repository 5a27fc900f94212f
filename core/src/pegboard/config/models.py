"""EngineConfig: one configuration for everything. Plain pydantic models, without sources (see ``sources`` and ``draft``).

All of them are frozen, comparable and picklable, and ``EngineConfig.model_validate(config.model_dump(mode="json"))`` equals
``config``: a worker process sees what its parent saw.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pegboard.config.values import (
    MAX_COUNT,
    MAX_INT,
    ByteSize,
    Count,
    PartName,
    PositiveInt,
    Seconds,
    Share,
    Text,
    parse_bytes,
    refuse_bool,
)

__all__ = [
    "AttentionConfig",
    "ByteSize",
    "CompilationConfig",
    "EngineConfig",
    "ExecutorConfig",
    "KVCacheSettings",
    "ObservabilityConfig",
    "PluginsConfig",
    "PositiveInt",
    "SamplingConfig",
    "SchedulerConfig",
    "Section",
    "StructuredOutputsConfig",
    "parse_bytes",
]

SectionT = TypeVar("SectionT", bound=BaseModel)


class Section(BaseModel):
    """Base of all sections, also a good one for a plugin's own: frozen, no unknown keys.

    ``principal`` is the field that a bare text stands for: ``executor = "mp"`` means ``executor.name = "mp"``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    principal: ClassVar[str] = ""


class ExecutorConfig(Section):
    principal: ClassVar[str] = "name"

    name: Annotated[Text, PartName("executor", auto=True)] = Field(
        default="auto", description="executor: auto, a provider's name, or 'package.module:Class'"
    )
    worker: Annotated[Text, PartName("worker")] = Field(
        default="default", description="worker: a provider's name, or 'package.module:Class'"
    )
    communicator: Annotated[Text, PartName("communicator", auto=True)] = Field(
        default="auto", description="communicator among the ranks: auto, or a provider's name"
    )
    tensor_parallel_size: PositiveInt = Field(default=1, description="ranks that share each layer")
    pipeline_parallel_size: PositiveInt = Field(default=1, description="stages that share the layers")
    pipeline_split: tuple[PositiveInt, ...] | None = Field(
        default=None, description="layers of each pipeline stage; default: balanced, fewer on the last, which has the output head"
    )
    num_threads: PositiveInt | None = Field(
        default=None,
        description="compute threads per worker; default: the cores this process may use, divided by its workers",
    )
    step_timeout: Seconds | None = Field(default=None, description="seconds after which a step counts as hung; null waits")


class SchedulerConfig(Section):
    """``max_num_batched_tokens`` may be smaller than ``max_num_seqs``: a round of decodes then takes several steps."""

    principal: ClassVar[str] = "name"

    name: Annotated[Text, PartName("scheduler", auto=True)] = Field(
        default="auto", description="scheduler: auto, a provider's name, or 'package.module:Class'"
    )
    queue: Annotated[Text, PartName("request_queue")] = Field(
        default="fcfs", description="order in which waiting requests are admitted"
    )
    admission: Annotated[Text, PartName("admission_policy")] = Field(
        default="default", description="admission policy: may the next waiting request start"
    )
    chunking: Annotated[Text, PartName("chunk_policy")] = Field(
        default="default", description="chunk policy: tokens per step of a long prefill"
    )
    preemption: Annotated[Text, PartName("preemption_policy", auto=True)] = Field(
        default="auto", description="preemption policy: who gives up KV blocks when they run out"
    )
    max_num_seqs: PositiveInt = Field(default=64, description="requests that run at once")
    max_num_batched_tokens: PositiveInt = Field(default=2048, description="tokens computed per step")
    long_prefill_token_threshold: Count = Field(
        default=0, description="most tokens of one prompt per step; 0: no limit of its own"
    )
    strict: bool = Field(
        default=False, description="a policy that raises ends the engine instead of falling back to the default decision"
    )


class KVCacheSettings(Section):
    principal: ClassVar[str] = "allocator"

    allocator: Annotated[Text, PartName("kv_allocator", auto=True)] = Field(
        default="auto", description="KV allocator: auto, paged, prefix, or another provider's name"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3"] = Field(
        default="auto", description="precision of stored keys and values: auto (that of the model), or another; fp8 is fp8_e4m3"
    )
    block_size: PositiveInt = Field(default=16, description="tokens per block")
    memory: ByteSize | None = Field(default=None, description="bytes for the KV cache of each worker; default: measured")
    num_blocks: PositiveInt | None = Field(default=None, description="exact number of usable blocks; overrides memory")
    swap_space: ByteSize = Field(default=0, description="host memory for swapped-out blocks, in bytes")
    memory_fraction: Share = Field(
        default=0.9, description="share of a device's memory that the engine may use when memory is not given"
    )

    def stored_dtype(self, dtype: str) -> str:
        """torch's name for the type of what is stored, where the model computes in ``dtype``."""
        names = {"auto": dtype, "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
        return names.get(self.dtype, self.dtype)


class AttentionConfig(Section):
    principal: ClassVar[str] = "backend"

    backend: Annotated[Text, PartName("attention", auto=True, paired=True)] = Field(
        default="auto", description="attention backend: auto, a provider's name, or two of them: prefill,decode"
    )


class CompilationConfig(Section):
    graph_runner: Annotated[Text, PartName("graph_runner")] = Field(
        default="default", description="graph runner: replays captured forwards; a provider's name"
    )
    enforce_eager: bool = Field(default=False, description="launch every operation as it comes: no graphs, nothing compiled")
    capture_sizes: tuple[PositiveInt, ...] | None = Field(
        default=None,
        description="rows of the decode steps to capture, to which others are padded; default: 1, 2, 4, 8, then in steps of 8 "
        "and more, up to scheduler.max_num_seqs",
    )
    torch_compile: bool = Field(default=False, description="compile the model's forward with torch.compile")


class SamplingConfig(Section):
    principal: ClassVar[str] = "sampler"

    sampler: Annotated[Text, PartName("sampler")] = Field(default="default", description="sampler: from logits to tokens")
    logits_processors: Annotated[tuple[str, ...], PartName("logits_processor")] = Field(
        default=(), description="logits processors to apply, in this order"
    )


class StructuredOutputsConfig(Section):
    principal: ClassVar[str] = "backend"

    backend: Annotated[Text, PartName("grammar", auto=True)] = Field(
        default="auto", description="grammar backend: auto, or a provider's name"
    )
    compile_threads: PositiveInt = Field(default=2, description="grammars compiled at once")
    compile_timeout: Seconds = Field(default=30.0, description="seconds after which a request whose grammar is not ready fails")


class ObservabilityConfig(Section):
    stat_loggers: Annotated[tuple[str, ...], PartName("stat_logger")] = Field(default=(), description="stat loggers to feed")
    event_sinks: Annotated[tuple[str, ...], PartName("event_sink")] = Field(default=(), description="event sinks to feed")
    log_interval: Seconds = Field(default=10.0, description="seconds between log lines of stat loggers")


class PluginsConfig(BaseModel):
    """``enabled`` … are core's own; any other key is the section of a plugin, checked by the plugin's model.

    A section is held as plain data (what JSON can hold), with the plugin's defaults filled in, so that a configuration can be
    compared, stored and sent to a process before any plugin is imported. ``section`` gives it back typed.
    """

    model_config = ConfigDict(frozen=True, extra="allow", validate_default=True)

    enabled: tuple[str, ...] = Field(default=(), description="extensions and observers that are active in this engine")
    required: tuple[str, ...] = Field(
        default=(), description="distributions that must be installed, as 'name' or 'name>=version'"
    )
    allow: tuple[str, ...] | None = Field(
        default=None,
        description="load only these plugins, by entry point or distribution; [] loads none but the standard parts",
    )
    block: tuple[str, ...] = Field(default=(), description="never load these plugins, by entry point or distribution")
    strict: bool = Field(default=False, description="a broken plugin is an error even if nothing names it")

    @property
    def sections(self) -> dict[str, Any]:
        """Plugin sections that this configuration holds, by name, as plain data."""
        return dict(self.model_extra or {})

    def section(self, name: str, model: type[SectionT]) -> SectionT:
        """The section ``name`` as ``model``; all defaults if the configuration does not have it. Raises pydantic's error."""
        return model.model_validate(self.sections.get(name, {}))


PLUGINS_KEYS: Final = frozenset(PluginsConfig.model_fields)
"""Keys of the plugins section that belong to core; a plugin section cannot have one of these names."""


class EngineConfig(Section):
    """Everything an engine is made of. ``load_config`` builds it from file, environment and arguments."""

    model: Text = Field(description="folder, hub id, .gguf file, or a name that a plugin resolves")
    model_impl: Annotated[Text, PartName("model", auto=True, words=("native",))] = Field(
        default="auto",
        description="model implementation: auto (native where there is one), native, or a provider's name, such as transformers",
    )
    tokenizer: Text | None = Field(default=None, description="folder or hub id of a tokenizer other than the model's own")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="compute and weight precision; auto follows the checkpoint"
    )
    max_model_len: Annotated[int, Field(ge=2, le=MAX_COUNT), BeforeValidator(refuse_bool)] | None = Field(
        default=None, description="context length, prompt and answer together; default: the model's own"
    )
    device: Annotated[Text, PartName("platform", auto=True)] = Field(
        default="auto", description="platform: auto, cpu, cuda, or another provider's name"
    )
    load_format: Annotated[Text, PartName("weight_loader", auto=True)] = Field(
        default="auto", description="weight loader: auto, or a provider's name (dummy: random weights)"
    )
    seed: Annotated[int, Field(ge=0, le=MAX_INT), BeforeValidator(refuse_bool)] | None = Field(
        default=None,
        description="seeds requests that have no seed, and dummy weights; default: such requests never repeat, and 0 for weights",
    )
    chat_template: str | None = Field(
        default=None, description="chat template text, or path of a file that holds it; default: the model's own"
    )
    executor: ExecutorConfig = Field(default_factory=ExecutorConfig, description="where workers live")
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig, description="which requests run in a step")
    kv_cache: KVCacheSettings = Field(default_factory=KVCacheSettings, description="memory for keys and values")
    attention: AttentionConfig = Field(default_factory=AttentionConfig, description="attention kernels")
    compilation: CompilationConfig = Field(default_factory=CompilationConfig, description="graphs and compiled code")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="how tokens are chosen")
    structured_outputs: StructuredOutputsConfig = Field(
        default_factory=StructuredOutputsConfig, description="answers that belong to a language"
    )
    observability: ObservabilityConfig = Field(default_factory=ObservabilityConfig, description="who is told what happens")
    plugins: PluginsConfig = Field(
        default_factory=PluginsConfig, description="which plugins are loaded, and a section for each that has options"
    )
