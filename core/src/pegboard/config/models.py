"""EngineConfig: one configuration for everything. Plain pydantic models, without sources (see ``sources``)."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


def parse_bytes(value: Any) -> Any:
    """``"4GiB"``, ``"512 MB"``, ``"1.5G"`` or a number, in bytes; K, M, G and T are powers of 1024 with or without "iB"."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", value, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{value!r} is not a size; write a number of bytes, or for example '512MiB' or '4GiB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])


ByteSize = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
PositiveInt = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class ExecutorConfig(Section):
    name: str = Field("auto", description="executor: auto, a provider's name, or 'package.module:Class'")
    worker: str = Field("default", description="worker: a provider's name, or 'package.module:Class'")
    tensor_parallel_size: PositiveInt = Field(1, description="ranks that share each layer")
    pipeline_parallel_size: PositiveInt = Field(1, description="stages that share the layers")
    num_threads: PositiveInt | None = Field(None, description="compute threads per worker; default: the cores this process may use, divided by its workers")
    step_timeout: float | None = Field(None, gt=0, description="seconds after which a step counts as hung; None waits")


class SchedulerConfig(Section):
    name: str = Field("auto", description="scheduler: auto, a provider's name, or 'package.module:Class'")
    queue: str = Field("fcfs", description="order in which waiting requests are admitted")
    admission: str = Field("default", description="admission policy")
    chunking: str = Field("default", description="chunk policy for long prefills")
    preemption: str = Field("auto", description="preemption policy")
    max_num_seqs: PositiveInt = Field(64, description="requests that run at once")
    max_num_batched_tokens: PositiveInt = Field(2048, description="tokens computed per step")
    long_prefill_token_threshold: int = Field(0, ge=0, description="most tokens of one prompt per step; 0: no limit of its own")
    strict: bool = Field(False, description="a policy that raises ends the engine instead of falling back to the default decision")


class KVCacheSettings(Section):
    allocator: str = Field("auto", description="KV allocator: paged, prefix, or a provider's name")
    block_size: PositiveInt = Field(16, description="tokens per block")
    memory: ByteSize | None = Field(None, description="bytes for the KV cache of each worker; default: measured")
    num_blocks: PositiveInt | None = Field(None, description="exact number of usable blocks; overrides memory")
    swap_space: ByteSize = Field(0, description="host memory for swapped-out blocks")
    memory_fraction: float = Field(0.9, gt=0, le=1, description="share of a device's memory that the engine may use when memory is not given")


class AttentionConfig(Section):
    backend: str = Field("auto", description="attention backend: auto, or a provider's name")


class SamplingConfig(Section):
    sampler: str = Field("default", description="sampler")


class ObservabilityConfig(Section):
    stat_loggers: list[str] = Field([], description="stat loggers to feed")
    event_sinks: list[str] = Field([], description="event sinks to feed")
    log_interval: float = Field(10.0, gt=0, description="seconds between log lines of stat loggers")


class PluginsConfig(BaseModel):
    """``enabled`` … are core's own; any other key is a plugin's section, checked by the plugin's model."""

    model_config = ConfigDict(frozen=True, extra="allow")

    enabled: list[str] = Field([], description="extensions and observers that are active in this engine")
    required: list[str] = Field([], description="distributions that must be installed, as 'name' or 'name>=version'")
    allow: list[str] | None = Field(None, description="load only these plugins, by entry point or distribution; [] loads none but the standard parts")
    block: list[str] = Field([], description="never load these plugins, by entry point or distribution")
    strict: bool = Field(False, description="a broken plugin is an error even if nothing names it")


class EngineConfig(Section):
    """Everything an engine is made of. ``load_config`` (see ``sources``) builds it from file, environment and arguments."""

    model: str = Field(description="folder, hub id, .gguf file, or a name that a plugin resolves")
    tokenizer: str | None = Field(None, description="folder or hub id of a tokenizer other than the model's own")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="compute and weight precision")
    max_model_len: PositiveInt | None = Field(None, description="context length; default: the model's own")
    device: str = Field("auto", description="platform: auto, cpu, cuda, or a provider's name")
    load_format: str = Field("auto", description="weight loader: auto, or a provider's name (dummy: random weights)")
    seed: int = Field(0, ge=0, description="seeds requests that have no seed, and dummy weights")
    chat_template: str | None = Field(None, description="chat template text, or path of a file that holds it")
    executor: ExecutorConfig = ExecutorConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    kv_cache: KVCacheSettings = KVCacheSettings()
    attention: AttentionConfig = AttentionConfig()
    sampling: SamplingConfig = SamplingConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    plugins: PluginsConfig = PluginsConfig()
