"""The standard parts, offered through the same entry point and hooks as anybody's. Imports no part and no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pegboard.plugins import hookimpl
from pegboard.plugins.provider import (
    AdmissionPolicyProvider,
    AttentionBackendProvider,
    ChunkPolicyProvider,
    CommunicatorProvider,
    EventSinkProvider,
    ExecutorProvider,
    GrammarProvider,
    GraphRunnerProvider,
    KVAllocatorProvider,
    ModelProvider,
    PlatformProvider,
    PreemptionPolicyProvider,
    RequestQueueProvider,
    SamplerProvider,
    SchedulerProvider,
    StatLoggerProvider,
    TokenizerProvider,
    WeightLoaderProvider,
    WorkerProvider,
)

_HERE = "pegboard_plugins"


@hookimpl
def executors() -> Iterable[ExecutorProvider]:
    yield ExecutorProvider(
        name="uniproc",
        target=f"{_HERE}.executors.uniproc:UniProcExecutor",
        summary="one worker, in the engine's own process",
    )
    yield ExecutorProvider(
        name="external_launcher",
        target=f"{_HERE}.executors.external_launcher:ExternalLauncherExecutor",
        capabilities=frozenset({"tp", "pp", "external_launch"}),
        config=f"{_HERE}.options:StandardOptions",
        summary="one process per rank, each started by torchrun, Slurm or another launcher with an engine of its own",
    )


@hookimpl
def workers() -> Iterable[WorkerProvider]:
    yield WorkerProvider(
        name="default", target=f"{_HERE}.worker.worker:StandardWorker", summary="one torch device with a resident batch"
    )


@hookimpl
def communicators() -> Iterable[CommunicatorProvider]:
    yield CommunicatorProvider(
        name="shared_memory",
        target=f"{_HERE}.communicators.shared_memory:SharedMemoryCommunicator",
        one_host=True,
        priority=10,
        summary="through shared memory, for ranks on one host",
    )
    yield CommunicatorProvider(
        name="torch_distributed",
        target=f"{_HERE}.communicators.torch_distributed:TorchDistributedCommunicator",
        devices=("cpu", "cuda"),
        summary="gloo on the processor, NCCL on CUDA devices",
    )


@hookimpl
def platforms() -> Iterable[PlatformProvider]:
    yield PlatformProvider(name="cpu", target=f"{_HERE}.worker.platforms:CpuPlatform", summary="the processor")
    yield PlatformProvider(name="cuda", target=f"{_HERE}.worker.platforms:CudaPlatform", priority=10, summary="NVIDIA devices")


@hookimpl
def attention_backends() -> Iterable[AttentionBackendProvider]:
    yield AttentionBackendProvider(
        name="torch",
        target=f"{_HERE}.attention.torch_backend:TorchAttentionBackend",
        summary="paged attention with torch operations, on any device",
    )


@hookimpl
def graph_runners() -> Iterable[GraphRunnerProvider]:
    yield GraphRunnerProvider(
        name="default",
        target=f"{_HERE}.graphs.runner:DecodeGraphRunner",
        summary="decode steps, captured at several batch sizes",
    )


@hookimpl
def schedulers() -> Iterable[SchedulerProvider]:
    yield SchedulerProvider(
        name="default",
        target=f"{_HERE}.scheduling.scheduler:DefaultScheduler",
        capabilities=frozenset({"async_steps", "grammars", "prompt_logprobs", "windows"}),
        summary="continuous batching with mixed prefill and decode, composed of policies",
    )


@hookimpl
def request_queues() -> Iterable[RequestQueueProvider]:
    yield RequestQueueProvider(name="fcfs", target=f"{_HERE}.scheduling.queues:FCFSQueue", summary="first come, first served")
    yield RequestQueueProvider(
        name="priority", target=f"{_HERE}.scheduling.queues:PriorityQueue", summary="smaller priority first, then arrival"
    )


@hookimpl
def admission_policies() -> Iterable[AdmissionPolicyProvider]:
    yield AdmissionPolicyProvider(
        name="default",
        target=f"{_HERE}.scheduling.admission:DefaultAdmission",
        summary="admit what fits, keep a small reserve",
    )


@hookimpl
def chunk_policies() -> Iterable[ChunkPolicyProvider]:
    yield ChunkPolicyProvider(
        name="default",
        target=f"{_HERE}.scheduling.chunking:DefaultChunking",
        summary="fill the budget, up to the long-prefill limit",
    )


@hookimpl
def preemption_policies() -> Iterable[PreemptionPolicyProvider]:
    yield PreemptionPolicyProvider(
        name="recompute",
        target=f"{_HERE}.scheduling.preemption:RecomputePreemption",
        summary="youngest first, computed again later",
    )


@hookimpl
def kv_allocators() -> Iterable[KVAllocatorProvider]:
    yield KVAllocatorProvider(name="paged", target=f"{_HERE}.kv.paged:PagedAllocator", summary="blocks without prefix caching")
    yield KVAllocatorProvider(
        name="prefix",
        target=f"{_HERE}.kv.prefix:PrefixAllocator",
        capabilities=frozenset({"prefix_caching"}),
        summary="full blocks are found again by a hash chain, least recently used evicted first",
    )


@hookimpl
def models() -> Iterable[ModelProvider]:
    yield ModelProvider(
        name="llama",
        target=f"{_HERE}.models.llama:LlamaForCausalLM",
        spec=f"{_HERE}.models.spec:llama_spec",
        parallel=f"{_HERE}.models.spec:llama_parallel",
        capabilities=frozenset({"tp", "pp"}),
        architectures=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
        summary="Llama, Mistral, SmolLM, Qwen2, Qwen3",
    )
    yield ModelProvider(
        name="gemma",
        target=f"{_HERE}.models.gemma:GemmaForCausalLM",
        spec=f"{_HERE}.models.spec:gemma_spec",
        parallel=f"{_HERE}.models.spec:gemma_parallel",
        capabilities=frozenset({"tp", "pp"}),
        architectures=("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        summary="Gemma 2, Gemma 3 (text)",
    )
    yield ModelProvider(
        name="transformers",
        target=f"{_HERE}.models.transformers.model:TransformersModel",
        spec=f"{_HERE}.models.transformers.spec:transformers_spec",
        accepts=f"{_HERE}.models.transformers.spec:transformers_refusals",
        parallel=f"{_HERE}.models.transformers.spec:transformers_parallel",
        stages=f"{_HERE}.models.transformers.spec:transformers_stages",
        capabilities=frozenset({"tp", "pp"}),
        summary="any causal model of transformers whose attention goes through its interface",
    )


@hookimpl
def weight_loaders() -> Iterable[WeightLoaderProvider]:
    yield WeightLoaderProvider(
        name="safetensors",
        target=f"{_HERE}.loaders.safetensors_loader:SafetensorsLoader",
        summary="single and sharded safetensors, mapped",
    )
    yield WeightLoaderProvider(name="gguf", target=f"{_HERE}.loaders.gguf_loader:GGUFLoader", summary="GGUF, dequantised")
    yield WeightLoaderProvider(name="dummy", target=f"{_HERE}.loaders.dummy:DummyLoader", summary="random weights from the seed")


@hookimpl
def tokenizers() -> Iterable[TokenizerProvider]:
    yield TokenizerProvider(name="hf", target=f"{_HERE}.tokenizers.hf:HFTokenizer", summary="tokenizer.json")
    yield TokenizerProvider(
        name="gguf", target=f"{_HERE}.tokenizers.gguf:GGUFTokenizer", summary="the tokenizer inside a GGUF file"
    )


@hookimpl
def samplers() -> Iterable[SamplerProvider]:
    yield SamplerProvider(
        name="default",
        target=f"{_HERE}.sampling.sampler:DefaultSampler",
        summary="greedy, temperature, top-k, top-p, min-p, penalties",
    )


@hookimpl
def grammars() -> Iterable[GrammarProvider]:
    yield GrammarProvider(
        name="llguidance",
        target=f"{_HERE}.grammars.llguidance_backend:LLGuidanceBackend",
        config=f"{_HERE}.options:StandardOptions",
        summary="JSON schema, regex, choice, Lark and GBNF grammars, by llguidance",
    )


@hookimpl
def stat_loggers() -> Iterable[StatLoggerProvider]:
    yield StatLoggerProvider(name="log", target=f"{_HERE}.observability:LogStatLogger", summary="one log line per interval")


@hookimpl
def event_sinks() -> Iterable[EventSinkProvider]:
    yield EventSinkProvider(name="log", target=f"{_HERE}.observability:LogEventSink", summary="one debug log line per event")


@hookimpl
def resolve_model(ref: str, config: Any) -> Any:
    from pegboard_plugins.loaders.resolve import resolve

    return resolve(ref, config)
