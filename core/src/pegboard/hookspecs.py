"""Everything that can be plugged, from top to bottom.

A plugin is a module (or an object) whose functions carry ``@hookimpl`` and are named like a hook below. Its package names it in
the entry-point group ``pegboard``; see docs/plugins.md. A plugin implements the hooks that it needs, and of each hook's
arguments those that it uses. Every example below is a whole plugin and runs in the tests.

Order of this file: parts; who decides where the configuration says "auto"; configuration; models; start and stop; requests;
command line; hooks of your own.

A hook costs about a microsecond, so hooks are called at start and at most once per request. What runs in every step is an
object that was made from a provider at start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pegboard.plugins.markers import hookspec

if TYPE_CHECKING:
    import argparse

    import pluggy

    from pegboard.config import EngineConfig
    from pegboard.config.draft import PluginDraft
    from pegboard.contracts.attention import AttentionQuery
    from pegboard.contracts.model_source import ModelSource
    from pegboard.engine.info import EngineInfo
    from pegboard.plugins.lifecycle import WorkerContext
    from pegboard.plugins.provider import (
        AdmissionPolicyProvider,
        AttentionBackendProvider,
        ChunkPolicyProvider,
        CliCommand,
        CommunicatorProvider,
        ConfigSection,
        EventSinkProvider,
        ExecutorProvider,
        GrammarProvider,
        GraphRunnerProvider,
        KVAllocatorProvider,
        LogitsProcessorProvider,
        ModelProvider,
        PlatformProvider,
        PreemptionPolicyProvider,
        Problem,
        RequestFields,
        RequestQueueProvider,
        SamplerProvider,
        SchedulerProvider,
        StatLoggerProvider,
        TokenizerProvider,
        WeightLoaderProvider,
        WorkerExtensionProvider,
        WorkerProvider,
    )
    from pegboard.wire import EngineCoreRequest

# -- parts: each hook returns or yields providers of its kind; an installed part does nothing until it is named or picked


@hookspec
def executors() -> Iterable[ExecutorProvider]:
    """Where workers live and how calls reach them. Named by ``executor.name``.

    ```python
    from pegboard.plugins import ExecutorProvider, hookimpl

    @hookimpl
    def executors():
        yield ExecutorProvider(
            name="threads",
            target="acme_threads.executor:ThreadExecutor",  # imported when it is used, not when it is listed
            capabilities={"tp"},
            summary="one thread per rank",
        )
    ```
    """
    return ()


@hookspec
def workers() -> Iterable[WorkerProvider]:
    """One device: boots it, holds the model, runs steps. Named by ``executor.worker``.

    ```python
    from pegboard.plugins import WorkerProvider, hookimpl

    @hookimpl
    def workers():
        yield WorkerProvider(name="npu", target="acme_npu.worker:NpuWorker", summary="one ACME device")
    ```
    """
    return ()


@hookspec
def worker_extensions() -> Iterable[WorkerExtensionProvider]:
    """Rides along with every worker: RPC methods of its own, and a look at each step. On for the plugins in ``plugins.enabled``.

    ```python
    from pegboard.contracts.worker import WorkerExtension, rpc
    from pegboard.plugins import WorkerExtensionProvider, hookimpl

    class StepCounter(WorkerExtension):
        def __init__(self):
            self.steps = 0

        def before_forward(self, plan):
            self.steps += 1

        @rpc("count")
        def count(self):  # executor.collective_rpc("step_counter.count")
            return self.steps

    @hookimpl
    def worker_extensions():
        yield WorkerExtensionProvider(name="step_counter", target=StepCounter, summary="counts steps")
    ```
    """
    return ()


@hookspec
def communicators() -> Iterable[CommunicatorProvider]:
    """Collectives among the ranks of one engine. Named by ``executor.communicator``; for "auto" the one with the highest priority
    that serves the device.

    ```python
    from pegboard.plugins import CommunicatorProvider, hookimpl

    @hookimpl
    def communicators():
        yield CommunicatorProvider(
            name="acme", target="acme_link:AcmeCommunicator", devices=("npu",), summary="collectives over ACME's links"
        )
    ```
    """
    return ()


@hookspec
def platforms() -> Iterable[PlatformProvider]:
    """Families of devices. Named by ``device``; for "auto" the available one with the highest priority.

    ```python
    from pegboard.plugins import PlatformProvider, hookimpl

    @hookimpl
    def platforms():
        yield PlatformProvider(name="npu", target="acme_npu.platform:NpuPlatform", priority=20, summary="ACME devices")
    ```
    """
    return ()


@hookspec
def attention_backends() -> Iterable[AttentionBackendProvider]:
    """Paged attention kernels. Named by ``attention.backend``; for "auto" the one with the highest priority that supports the
    model.

    ```python
    from pegboard.plugins import AttentionBackendProvider, hookimpl

    @hookimpl
    def attention_backends():
        yield AttentionBackendProvider(name="acme", target="acme_kernels:AcmeAttention", priority=5, summary="ACME kernels")
    ```
    """
    return ()


@hookspec
def graph_runners() -> Iterable[GraphRunnerProvider]:
    """Replays captured forwards, where device, model and attention backend can be captured. Named by
    ``compilation.graph_runner``.

    ```python
    from pegboard.contracts.graph_runner import GraphReport, GraphRunner
    from pegboard.plugins import GraphRunnerProvider, hookimpl

    class NoGraphs(GraphRunner):
        report = GraphReport(off=("this runner has none",))

        def measure(self, target):
            return 0

        def capture(self, target):
            return self.report

        def fits(self, attention):
            return False  # every step goes the usual way

        def run(self, inputs):
            raise RuntimeError("no step fits")

        def drop(self):
            pass

    @hookimpl
    def graph_runners():
        yield GraphRunnerProvider(name="none", target=NoGraphs, summary="no graphs")
    ```
    """
    return ()


@hookspec
def schedulers() -> Iterable[SchedulerProvider]:
    """The whole scheduler. Named by ``scheduler.name``. To change one decision only, see the four hooks that follow.

    ```python
    from pegboard.plugins import SchedulerProvider, hookimpl

    @hookimpl
    def schedulers():
        yield SchedulerProvider(name="phased", target="acme_sched:PhasedScheduler", summary="prefill or decode, never both")
    ```
    """
    return ()


@hookspec
def request_queues() -> Iterable[RequestQueueProvider]:
    """The order in which waiting requests are admitted. Named by ``scheduler.queue``.

    ```python
    from pegboard.contracts.request_queue import KeyedRequestQueue
    from pegboard.plugins import RequestQueueProvider, hookimpl

    class ShortestPromptFirst(KeyedRequestQueue):
        def key(self, request):
            return request.num_prompt_tokens

    @hookimpl
    def request_queues():
        yield RequestQueueProvider(name="shortest_prompt_first", target=ShortestPromptFirst, summary="shortest prompt first")
    ```
    """
    return ()


@hookspec
def admission_policies() -> Iterable[AdmissionPolicyProvider]:
    """May the next waiting request start now? Named by ``scheduler.admission``.

    ```python
    from pegboard.contracts.admission_policy import AdmissionPolicy, Hold
    from pegboard.plugins import AdmissionPolicyProvider, hookimpl

    class KeepHeadroom(AdmissionPolicy):
        def admit(self, request, context):
            return Hold("the KV cache is 80 % full") if context.kv_usage > 0.8 else None  # None: the default decides

    @hookimpl
    def admission_policies():
        yield AdmissionPolicyProvider(name="headroom", target=KeepHeadroom, summary="admit below 80 % KV usage")
    ```
    """
    return ()


@hookspec
def chunk_policies() -> Iterable[ChunkPolicyProvider]:
    """How many tokens of a long prompt go into one step? Named by ``scheduler.chunking``.

    ```python
    from pegboard.contracts.chunk_policy import ChunkPolicy
    from pegboard.plugins import ChunkPolicyProvider, hookimpl

    class SmallWhenBusy(ChunkPolicy):
        def chunk_tokens(self, request, remaining, context):
            return min(remaining, 256) if context.num_running > 8 else None

    @hookimpl
    def chunk_policies():
        yield ChunkPolicyProvider(name="small_when_busy", target=SmallWhenBusy, summary="256 tokens a step while others run")
    ```
    """
    return ()


@hookspec
def preemption_policies() -> Iterable[PreemptionPolicyProvider]:
    """Who gives up KV blocks when they run out. Named by ``scheduler.preemption``.

    ```python
    from pegboard.contracts.preemption_policy import PreemptionPolicy
    from pegboard.plugins import PreemptionPolicyProvider, hookimpl

    class FewestTokensFirst(PreemptionPolicy):
        def victims(self, need, candidates, context):
            return [r.request_id for r in sorted(candidates, key=lambda r: r.num_tokens)]

    @hookimpl
    def preemption_policies():
        yield PreemptionPolicyProvider(name="fewest_tokens", target=FewestTokensFirst, summary="who loses least work")
    ```
    """
    return ()


@hookspec
def kv_allocators() -> Iterable[KVAllocatorProvider]:
    """Bookkeeping of KV-cache blocks. Named by ``kv_cache.allocator``.

    ```python
    from pegboard.plugins import KVAllocatorProvider, hookimpl

    @hookimpl
    def kv_allocators():
        yield KVAllocatorProvider(
            name="radix", target="acme_kv.radix:RadixAllocator", capabilities={"prefix_caching"}, summary="radix tree of prefixes"
        )
    ```
    """
    return ()


@hookspec
def models() -> Iterable[ModelProvider]:
    """Architectures. Picked by the ``architectures`` that a checkpoint states; ``spec`` reads its sizes without torch.

    ```python
    from pegboard.plugins import ModelProvider, hookimpl

    @hookimpl
    def models():
        yield ModelProvider(
            name="acme",
            target="acme_models.acme:AcmeForCausalLM",
            spec="acme_models.spec:acme_spec",
            architectures=("AcmeForCausalLM",),
            summary="ACME's models",
        )
    ```
    """
    return ()


@hookspec
def weight_loaders() -> Iterable[WeightLoaderProvider]:
    """File formats of weights. Named by the ``ModelSource``, or by ``load_format``.

    ```python
    from pegboard.plugins import WeightLoaderProvider, hookimpl

    @hookimpl
    def weight_loaders():
        yield WeightLoaderProvider(name="npz", target="acme_npz:NpzLoader", summary="NumPy archives")
    ```
    """
    return ()


@hookspec
def tokenizers() -> Iterable[TokenizerProvider]:
    """Text to token ids and back, and chat templates. Named by the ``ModelSource``.

    ```python
    from pegboard.plugins import TokenizerProvider, hookimpl

    @hookimpl
    def tokenizers():
        yield TokenizerProvider(name="bytes", target="acme_bytes:ByteTokenizer", summary="one token per byte")
    ```
    """
    return ()


@hookspec
def samplers() -> Iterable[SamplerProvider]:
    """From logits to tokens. Named by ``sampling.sampler``.

    ```python
    from pegboard.plugins import SamplerProvider, hookimpl

    @hookimpl
    def samplers():
        yield SamplerProvider(name="mirostat", target="acme_sampling:MirostatSampler", summary="constant perplexity")
    ```
    """
    return ()


@hookspec
def logits_processors() -> Iterable[LogitsProcessorProvider]:
    """Changes logits between the model and the choice. On for the names in ``sampling.logits_processors``, in that order.

    ```python
    from pegboard.contracts.logits_processor import LogitsProcessor
    from pegboard.plugins import LogitsProcessorProvider, hookimpl

    class NoRepeat(LogitsProcessor):
        def __init__(self):
            self.outputs = {}

        def update_state(self, delta):
            for row in delta.removed if delta else ():
                self.outputs.pop(row, None)
            for added in delta.added if delta else ():
                self.outputs[added.row] = added.output_token_ids  # live: always the output so far

        def apply(self, logits, rows):
            for i, row in enumerate(rows):
                if self.outputs[row]:
                    logits[i, self.outputs[row][-1]] = float("-inf")
            return logits

    @hookimpl
    def logits_processors():
        yield LogitsProcessorProvider(name="no_repeat", target=NoRepeat, summary="no token twice in a row")
    ```
    """
    return ()


@hookspec
def grammars() -> Iterable[GrammarProvider]:
    """Compiles JSON schemas, regular expressions and grammars to masks over the vocabulary. Named by
    ``structured_outputs.backend``; for "auto" the one with the highest priority.

    ```python
    from pegboard.plugins import GrammarProvider, hookimpl

    @hookimpl
    def grammars():
        yield GrammarProvider(name="acme", target="acme_grammar:AcmeGrammars", summary="ACME's grammar compiler")
    ```
    """
    return ()


@hookspec
def event_sinks() -> Iterable[EventSinkProvider]:
    """Observers of requests. On when listed in ``observability.event_sinks``, or for the plugins in ``plugins.enabled``.

    ```python
    from pegboard.contracts.event_sink import EventSink
    from pegboard.plugins import EventSinkProvider, hookimpl

    class PreemptionCounter(EventSink):
        def __init__(self):
            self.count = 0

        def emit(self, event):
            self.count += event.kind == "preempted"

    @hookimpl
    def event_sinks():
        yield EventSinkProvider(name="preemptions", target=PreemptionCounter, summary="counts preemptions")
    ```
    """
    return ()


@hookspec
def stat_loggers() -> Iterable[StatLoggerProvider]:
    """Get gauges and counters. On when listed in ``observability.stat_loggers``, or for the plugins in ``plugins.enabled``.

    ```python
    from pegboard.contracts.stat_logger import StatLogger
    from pegboard.plugins import StatLoggerProvider, hookimpl

    class TokenCounter(StatLogger):
        def __init__(self):
            self.tokens = 0

        def record(self, scheduler, iteration):
            self.tokens += iteration.num_generation_tokens

    @hookimpl
    def stat_loggers():
        yield StatLoggerProvider(name="tokens", target=TokenCounter, summary="counts generated tokens")
    ```
    """
    return ()


# -- who decides "auto": the first answer other than None counts; ``candidates`` are usable providers by name ---------
# Asked of Pegboard's own packages and of plugins in ``plugins.enabled``, in that list's order, enabled ones first.


@hookspec(firstresult=True)
def select_executor(config: EngineConfig, candidates: Mapping[str, ExecutorProvider]) -> str | None:
    """Which executor ``executor.name = "auto"`` means. Without an answer: uniproc for one rank, else one that can run several.

    An answer may say why, as those of all ``select_*`` hooks may: ``Chosen`` is a name with a reason, which is logged and shown
    by ``pegboard plugins show executor``.

    ```python
    from pegboard.plugins import Chosen, hookimpl

    @hookimpl
    def select_executor(config, candidates):
        ranks = config.executor.tensor_parallel_size
        return Chosen("threads", f"{ranks} ranks share memory") if "threads" in candidates and ranks > 1 else None
    ```
    """
    return None


@hookspec(firstresult=True)
def select_scheduler(config: EngineConfig, candidates: Mapping[str, SchedulerProvider]) -> str | None:
    """Which scheduler ``scheduler.name = "auto"`` means. Without an answer: default.

    ```python
    from pegboard.plugins import hookimpl

    @hookimpl
    def select_scheduler(config, candidates):
        return "phased" if "phased" in candidates and config.scheduler.max_num_seqs == 1 else None
    ```
    """
    return None


@hookspec(firstresult=True)
def select_preemption_policy(config: EngineConfig, candidates: Mapping[str, PreemptionPolicyProvider]) -> str | None:
    """Which policy ``scheduler.preemption = "auto"`` means. Without an answer: recompute.

    ```python
    from pegboard.plugins import hookimpl

    @hookimpl
    def select_preemption_policy(config, candidates):
        return "swap" if "swap" in candidates and config.kv_cache.swap_space > 0 else None
    ```
    """
    return None


@hookspec(firstresult=True)
def select_kv_allocator(config: EngineConfig, candidates: Mapping[str, KVAllocatorProvider]) -> str | None:
    """Which allocator ``kv_cache.allocator = "auto"`` means. Without an answer: prefix.

    ```python
    from pegboard.plugins import hookimpl

    @hookimpl
    def select_kv_allocator(config, candidates):
        return "paged" if "paged" in candidates and config.scheduler.max_num_seqs == 1 else None
    ```
    """
    return None


@hookspec(firstresult=True)
def select_attention_backend(query: AttentionQuery, candidates: Mapping[str, AttentionBackendProvider]) -> str | None:
    """Which backend ``attention.backend = "auto"`` means for one layer group; called in the worker. ``candidates`` support
    ``query``. Without an answer: the one with the highest priority.

    ```python
    from pegboard.plugins import hookimpl

    @hookimpl
    def select_attention_backend(query, candidates):
        return "acme" if "acme" in candidates and query.head_size == 256 else None
    ```
    """
    return None


# -- configuration -----------------------------------------------------------------------------------------------------


@hookspec
def config_sections() -> Iterable[ConfigSection]:
    """Typed options at ``plugins.<name>``, checked with the plugin's own pydantic model. A part gets its plugin's section as
    ``options``. Asked of every loaded plugin.

    ```python
    from pydantic import BaseModel, ConfigDict, Field

    from pegboard.plugins import ConfigSection, hookimpl

    class Options(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        limit: int = Field(1024, ge=1, description="prompts longer than this go last")

    @hookimpl
    def config_sections():
        return [ConfigSection("example", Options, summary="options of the example plugin")]
    ```
    """
    return ()


@hookspec
def configure(draft: PluginDraft) -> None:
    """Change the configuration before it is checked. What a user has set stays, unless the plugin forces it; every write is
    kept under the plugin's name (``pegboard config explain``).

    ```python
    from pegboard.plugins import hookimpl

    @hookimpl
    def configure(draft):
        if draft.get("scheduler.queue") == "fcfs":
            draft.set("scheduler.max_num_seqs", 32)
    ```
    """


@hookspec
def compile_cache_key(config: EngineConfig) -> str | None:
    """Something that the code of a compiled model depends on, beyond what the compiler sees: with another answer, code is kept in
    another folder. Called in each worker, where ``compilation.torch_compile`` is on. None: nothing.

    ```python
    import os

    from pegboard.plugins import hookimpl

    @hookimpl
    def compile_cache_key(config):
        return f"acme kernels, mode {os.environ.get('ACME_MODE', 'exact')}"
    ```
    """
    return None


@hookspec
def validate(config: EngineConfig) -> Iterable[Problem]:
    """Refuse a configuration. All problems of all plugins are shown at once.

    ```python
    from pegboard.plugins import Problem, hookimpl

    @hookimpl
    def validate(config):
        if config.dtype == "float16":
            yield Problem("dtype", "float16 overflows in ACME's models", "use bfloat16 or float32")
    ```
    """
    return ()


# -- models ------------------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def resolve_model(ref: str, config: EngineConfig) -> ModelSource | None:
    """Find the model that ``ref`` means: its files, its configuration, and which parts read it. None: not known here.

    Plugins in use are asked first, merely installed ones after them.

    ```python
    from pegboard.contracts.model_source import ModelSource
    from pegboard.plugins import hookimpl

    @hookimpl
    def resolve_model(ref, config):
        if ref != "acme-tiny":
            return None
        sizes = {"architectures": ["AcmeForCausalLM"], "hidden_size": 64}
        return ModelSource(ref=ref, path="/opt/acme/tiny", loader="safetensors", tokenizer="hf", config=sizes)
    ```
    """
    return None


# -- start and stop: of plugins in use ---------------------------------------------------------------------------------


@hookspec
def engine_starting(info: EngineInfo) -> None:
    """Model and sizes are known, the KV cache is about to be allocated. Called in the process of the engine core.

    ```python
    from pegboard.plugins import hookimpl

    @hookimpl
    def engine_starting(info):
        print(f"starting {info.model} with {info.num_blocks} KV blocks")
    ```
    """


@hookspec
def engine_ready(info: EngineInfo) -> None:
    """The engine takes requests from now on. Called in the process of the engine core.

    ```python
    from pegboard.plugins import hookimpl

    @hookimpl
    def engine_ready(info):
        print(f"{info.model} is ready, up to {info.max_model_len} tokens a request")
    ```
    """


@hookspec
def engine_stopping(info: EngineInfo | None) -> None:
    """The engine is about to stop its workers; ``info`` is None when it failed before its sizes were known. Called in the
    process of the engine core.

    ```python
    from pegboard.plugins import hookimpl

    @hookimpl
    def engine_stopping(info):
        print(f"{info.model} stops" if info else "the engine did not start")
    ```
    """


@hookspec
def worker_starting(context: WorkerContext) -> None:
    """A worker is about to initialise its device. Called in the worker's process.

    ```python
    import os

    from pegboard.plugins import hookimpl

    @hookimpl
    def worker_starting(context):
        os.environ.setdefault("ACME_RANK", str(context.world.rank))
    ```
    """


@hookspec
def worker_stopping(context: WorkerContext) -> None:
    """A worker is about to release its device. Called in the worker's process.

    ```python
    from pegboard.plugins import hookimpl

    @hookimpl
    def worker_stopping(context):
        print(f"rank {context.world.rank} stops")
    ```
    """


# -- requests ----------------------------------------------------------------------------------------------------------


@hookspec
def validate_request(request: EngineCoreRequest) -> None:
    """Refuse one request by raising ``ValueError``, whose message reaches the caller. Called once per request, after Pegboard's
    own checks; other requests are not touched.

    ```python
    from pegboard.plugins import hookimpl

    @hookimpl
    def validate_request(request):
        if request.priority < 0:
            raise ValueError(f"priority {request.priority} is reserved; use 0 or more")
    ```
    """


@hookspec
def request_fields() -> Iterable[RequestFields]:
    """Fields that a request may carry for this plugin, at ``ext[plugin name]``, checked with its own pydantic model when the
    request is made. Unknown fields, and fields for plugins that declare none, are refused.

    ```python
    from pydantic import BaseModel, ConfigDict, Field

    from pegboard.plugins import RequestFields, hookimpl

    class Fields(BaseModel):
        model_config = ConfigDict(extra="forbid")
        deadline: float = Field(gt=0, description="seconds after which the answer is of no use")

    @hookimpl
    def request_fields():
        return [RequestFields("example", Fields, summary="deadlines")]
    ```
    """
    return ()


@hookspec(firstresult=True)
def expand_request(request: EngineCoreRequest) -> Sequence[EngineCoreRequest] | None:
    """Make several requests of one whose ``sampling.n`` is more than 1; their answers are reported together, in this order. None:
    not this one. Without an answer: ``n`` copies with the seeds ``seed``, ``seed + 1`` …

    The requests need ids of their own and ``sampling.n`` 1; ``group`` says that they share their prompt.

    ```python
    import msgspec

    from pegboard.plugins import hookimpl

    @hookimpl
    def expand_request(request):
        if "example" not in request.ext:
            return None
        replace = msgspec.structs.replace
        return [  # one greedy answer, the others drawn
            replace(
                request,
                request_id=f"{request.request_id}/{i}",
                group=request.request_id,
                sampling=replace(request.sampling, n=1, temperature=1.0 if i else 0.0, seed=i),
            )
            for i in range(request.sampling.n)
        ]
    ```
    """
    return None


# -- command line: of every loaded plugin, because a command does nothing until somebody types it ----------------------


@hookspec
def cli_commands() -> Iterable[CliCommand]:
    """Commands of ``pegboard``.

    ```python
    from pegboard.plugins import CliCommand, hookimpl

    def add_arguments(parser):
        parser.add_argument("--name", default="world")

    def run(args):
        print(f"hello, {args.name}")

    @hookimpl
    def cli_commands():
        yield CliCommand("hello", run, summary="greet somebody", add_arguments=add_arguments)
    ```
    """
    return ()


@hookspec
def add_cli_options(command: str, group: argparse._ArgumentGroup) -> None:
    """Options for ``pegboard generate`` and ``pegboard chat``. An option whose ``dest`` is a path of the configuration, best in
    the plugin's own section, sets that value when it is given.

    ```python
    from pegboard.plugins import hookimpl

    @hookimpl
    def add_cli_options(command, group):
        if command == "generate":
            group.add_argument("--limit", type=int, dest="plugins.example.limit", help="prompts longer than this go last")
    ```
    """


# -- hooks of your own -------------------------------------------------------------------------------------------------


@hookspec
def add_hookspecs(pluginmanager: pluggy.PluginManager) -> None:
    """Open hooks that other plugins can implement. Called before any plugin's hooks are checked.

    ```python
    import types

    from pegboard.plugins import hookimpl, hookspec

    @hookspec
    def example_greeting(name):
        "What to say to somebody."

    @hookimpl
    def add_hookspecs(pluginmanager):
        pluginmanager.add_hookspecs(types.SimpleNamespace(example_greeting=example_greeting))
    ```
    """
