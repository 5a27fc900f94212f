"""StandardWorker: one torch device, booted in six phases."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from pegboard.config import EngineConfig
from pegboard.contracts.graph_runner import GraphRunner, GraphTarget
from pegboard.contracts.model import Model
from pegboard.contracts.platform import Platform
from pegboard.contracts.worker import Worker, rpc
from pegboard.plugins.lifecycle import WorkerContext
from pegboard.plugins.parallel import head_layers, stage_layers
from pegboard.wire import GrammarOutput, KVCacheConfig, KVCacheSpec, MemoryReport, ModelRunnerOutput, SchedulerOutput, World
from pegboard_plugins.compilation.folder import code_folder, key_parts
from pegboard_plugins.compilation.forward import LeftOut, compile_forward
from pegboard_plugins.worker import device_memory, dummy_step, memory
from pegboard_plugins.worker.cache_engine import CacheEngine
from pegboard_plugins.worker.dtypes import resolve_dtype
from pegboard_plugins.worker.graph_target import graph_target
from pegboard_plugins.worker.kv_precision import KVPrecision
from pegboard_plugins.worker.links import Intermediate, Links, Stage
from pegboard_plugins.worker.model_runner import ModelRunner
from pegboard_plugins.worker.threads import threads_per_worker

if TYPE_CHECKING:
    from pegboard.plugins import Composition

log = logging.getLogger(__name__)

_WARM_UP_ROWS = 8


class StandardWorker(Worker):
    """Model, attention backend, sampler and KV cache on one device, and the resident batch that plans change.

    With pipeline stages it holds the layers ``layers``; only the last stage has a sampler. Further RPC methods:
    ``set_vocab_limit``, ``record_timings``, ``layer_range``, ``attention_report``, ``graph_report``.
    """

    device: torch.device
    dtype: torch.dtype
    layers: range
    links: Links
    runner: ModelRunner

    def __init__(self, config: EngineConfig, composition: Composition, world: World) -> None:
        super().__init__(config, composition, world)
        self.platform: Platform = composition.create("platform")
        self._dtype_name = ""
        self._weight_bytes = 0
        self._stopped = False

    # lifecycle ------------------------------------------------------------------------------------------------------

    def init_device(self) -> None:
        self.composition.host.hook.worker_starting(context=self._context())
        threads = threads_per_worker(self.config.executor.num_threads, self.world.num_neighbours)
        self.device = self.platform.set_device(self.world.local_rank, threads)
        if self.device.type == "cpu":
            memory.keep_freed_pages()
        self._dtype_name = resolve_dtype(self.config.dtype, self.composition.spec.dtype, self.platform)
        self.dtype = getattr(torch, self._dtype_name)
        self._kv = KVPrecision(self.composition, self._dtype_name)
        self.extensions.update(self.composition.create_all("worker_extension"))
        log.info("rank %d: %s, %s, %d threads", self.world.rank, self.device, self._dtype_name, threads)
        self._take_place()

    @torch.no_grad()  # not inference mode: whoever updates weights in place later may do so in any mode
    def load_model(self) -> None:
        before = device_memory.in_use(self.device)
        model = self._make_model()
        self._weight_bytes = device_memory.weight_bytes(model) or max(0, device_memory.in_use(self.device) - before)
        self._tell_of_model(model)
        widths = model.intermediate_widths(self.composition.spec) if self.links.pp is not None else {}
        stage = Stage(self.world, self.links.pp, widths, self.dtype, self.device)
        self._attention = self._kv.attention(model, self._max_model_len, self.device, stage)
        self.runner = ModelRunner(
            self.config,
            self.composition.spec,
            model,
            self._attention.by_kind(),
            self.composition.create("sampler") if stage.is_last else None,
            self.device,
            self.extensions.values(),
            self.platform.synchronize,
            self.composition.create_all("logits_processor") if stage.is_last else None,
            stage,
        )
        self.runner.graphs = self.composition.create("graph_runner", platform=self.platform)
        device_memory.tidy(self.device)

    @torch.inference_mode()
    def compile_or_warm_up(self) -> None:
        """A prefill, two decode shapes and the sampler: whatever initialises itself on first use does so now. Then graphs are
        captured."""
        rows = min(_WARM_UP_ROWS, self.config.scheduler.max_num_seqs)
        tokens = min(2 * self.config.kv_cache.block_size, self._max_model_len, self.config.scheduler.max_num_batched_tokens)
        cache = self.runner.cache
        assert cache is not None, "the KV cache comes before the warm-up"
        for num_tokens, num_rows in ((tokens, 1), (rows, rows), (1, 1)):
            _, logits = self._dummy_forward(cache.device_caches, num_tokens, num_rows)
            if self.runner.sampler is not None and logits is not None:
                dummy_step.run_sampler(self.runner.sampler, logits, self.runner.batch.vocab_limit)
        self._capture_graphs()
        cache.clear_null_block()

    def check_health(self) -> None:
        self.platform.synchronize()

    def shutdown(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        if hasattr(self, "device"):
            self.composition.host.hook.worker_stopping(context=self._context())
        if hasattr(self, "runner") and self.runner.graphs is not None:
            self.runner.graphs.drop()  # NCCL does not close a communicator while there are graphs with its operations
        if hasattr(self, "links"):
            self.links.close()
        if hasattr(self, "runner"):
            del self.runner
        device_memory.tidy(getattr(self, "device", None))

    @rpc("lifecycle")
    def set_vocab_limit(self, limit: int) -> None:
        """Never choose or list token ids from ``limit`` on: rows of the embedding that only pad it have no token."""
        if limit < 1:
            raise ValueError(f"set_vocab_limit: {limit} leaves no token to choose")
        self.runner.batch.vocab_limit = min(limit, self.composition.spec.vocab_size)

    @rpc("lifecycle")
    def layer_range(self) -> tuple[int, int]:
        """The first decoder layer that this rank holds, and the one after its last."""
        return self.layers.start, self.layers.stop

    @rpc("lifecycle")
    def attention_report(self) -> list[dict[str, Any]]:
        """See ``AttentionChoices.report``."""
        return self._attention.report()

    @rpc("lifecycle")
    def graph_report(self) -> dict[str, Any]:
        """The fields of ``GraphReport``: what is captured, or every reason why nothing is."""
        return asdict(self._graphs.report)

    # memory ---------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def determine_available_memory(self) -> MemoryReport:
        """A real forward and sampler on ``max_num_batched_tokens`` tokens, and what forks and prompt log probabilities take on
        top; activations are how far memory rose meanwhile."""
        scheduler = self.config.scheduler
        if self.config.compilation.torch_compile:  # what the compiler takes is not what steps take
            self._dummy_forward(self._scratch_caches(), scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        device_memory.tidy(self.device)
        before = device_memory.in_use(self.device)
        device_memory.reset_peak(self.device)
        caches = self._scratch_caches()
        hidden, logits = self._dummy_forward(caches, scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        if self.runner.sampler is not None and isinstance(hidden, torch.Tensor) and logits is not None:
            dummy_step.copy_for_forks(logits)
            dummy_step.run_sampler(self.runner.sampler, logits, self.runner.batch.vocab_limit)
            del logits
            dummy_step.run_prompt_logprobs(self.runner.model, hidden, self.runner.batch.vocab_limit)
        self.platform.synchronize()
        activations = max(0, device_memory.peak(self.device) - before)
        del hidden
        device_memory.tidy(self.device)
        graphs = self._measure_graphs(caches)
        del caches
        device_memory.tidy(self.device)
        self.links.barrier()  # what others hold for a moment must not count as taken
        booked = sum(extension.on_memory_profile() for extension in self.extensions.values())
        available, reason = self._available(activations, booked + graphs)
        report = MemoryReport(
            weights=self._weight_bytes,
            activations=activations,
            resident=memory.resident(),
            available=available,
            reason=reason,
            graphs=graphs,
        )
        log.info("rank %d: %s", self.world.rank, report)
        return report

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return {
            layer.name: KVCacheSpec(
                block_size=self.config.kv_cache.block_size,
                num_kv_heads=layer.num_kv_heads,
                head_size=layer.head_size,
                dtype=self._kv.name,
                sliding_window=layer.sliding_window,
            )
            for layer in self.runner.model.attention_layers
        }

    def initialize_cache(self, kv_config: KVCacheConfig) -> None:
        layers = self.runner.model.attention_layers
        groups = [self._attention.group(group.layers) for group in kv_config.groups]
        backends = {name: type(group.backend) for group in groups for name in group.layers}
        self.runner.use_cache(CacheEngine(kv_config, layers, backends, self._kv.dtype, self.device), groups)

    # step -----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        return self.runner.execute_model(plan)

    @torch.inference_mode()
    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        return self.runner.sample_tokens(grammar)

    @rpc("profile")
    def record_timings(self, enable: bool) -> dict[str, float]:
        """Seconds per stage of the steps since it was switched on (see ``StepTimings``); then start anew, or stop."""
        return self.runner.timings.switch(enable)

    # sleep ----------------------------------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        """Level 1 gives the KV cache back, level 2 also the weights; what blocks held is lost. No request may be running."""
        if level not in (1, 2):
            raise ValueError(f"sleep: level {level!r} is neither 1 (KV cache) nor 2 (KV cache and weights)")
        if self.runner.batch.num_requests:
            raise RuntimeError(f"sleep: {self.runner.batch.num_requests} requests are running; finish or abort them first")
        self._graphs.drop()
        if self.runner.cache is not None:
            self.runner.cache.release()
        if level == 2:
            self.runner.model = None  # type: ignore[assignment]
        gc.collect()
        device_memory.tidy(self.device)

    @torch.no_grad()
    def wake_up(self, tags: list[str] | None) -> None:
        """Bring back ``tags`` ("weights", "kv_cache"), by default all that is asleep."""
        unknown = sorted(set(tags or ()) - {"weights", "kv_cache"})
        if unknown:
            raise ValueError(f"wake_up: {', '.join(unknown)} is none of 'weights', 'kv_cache'")
        if (tags is None or "weights" in tags) and self.runner.model is None:
            self.runner.model = self._make_model()
            self._tell_of_model(self.runner.model)
            device_memory.tidy(self.device)
        if (tags is None or "kv_cache" in tags) and self.runner.cache is not None and not self.runner.cache.device_caches:
            self.runner.cache.allocate()
        if self.runner.model is not None and not self._graphs.report.sizes:
            self._capture_graphs()

    # parts ----------------------------------------------------------------------------------------------------------

    def _take_place(self) -> None:
        """Find the layers of this rank's stage, and meet the other ranks."""
        settings, world, spec = self.config.executor, self.world, self.composition.spec
        stages = stage_layers(spec.num_layers, world.pp_size, settings.pipeline_split, head_layers(spec))
        self.layers = stages[world.pp_rank]
        if world.size > 1:
            log.info(
                "rank %d: part %d of %d, stage %d of %d with layers %d to %d (layers per stage: %s)",
                world.rank, world.tp_rank + 1, world.tp_size, world.pp_rank + 1, world.pp_size,
                self.layers.start, self.layers.stop - 1, ", ".join(str(len(layers)) for layers in stages),
            )  # fmt: skip
        self.links = Links(self.composition, world, self.device, settings.step_timeout)

    def _make_model(self) -> Model:
        composition, compiled = self.composition, self.config.compilation.torch_compile
        model: Model = composition.create(
            "model",
            dtype=self.dtype,
            device=self.device,
            world=self.world,
            communicator=LeftOut(self.links.tp) if compiled and self.links.tp is not None else self.links.tp,
            layers=self.layers,
            compiled=compiled,
        )
        with composition.create("weight_loader").open(composition.source, composition.spec) as weights:
            model.load_weights(self._kv.take_scales(weights))
        if compiled:
            folder = code_folder(key_parts(composition, self.world, self._dtype_name, self.device))
            compile_forward(model, folder, self.device)
        return model

    def _tell_of_model(self, model: Model) -> None:
        for extension in self.extensions.values():
            extension.on_model_loaded(model)

    def _scratch_caches(self) -> dict[str, torch.Tensor]:
        runner, block_size = self.runner, self.config.kv_cache.block_size
        return dummy_step.scratch_caches(runner.model, runner.groups, block_size, self._kv.dtype, self.device)

    def _dummy_forward(
        self, caches: dict[str, torch.Tensor], num_tokens: int, num_rows: int
    ) -> tuple[torch.Tensor | Intermediate, torch.Tensor | None]:
        lengths, runner = dummy_step.spread(num_tokens, num_rows, self._max_model_len), self.runner
        block_size = self.config.kv_cache.block_size
        return dummy_step.run_forward(runner.model, runner.groups, caches, lengths, block_size, self.device, runner.stage)

    # graphs ---------------------------------------------------------------------------------------------------------

    @property
    def _graphs(self) -> GraphRunner:
        assert self.runner.graphs is not None, "it comes with the model"
        return self.runner.graphs

    def _graph_target(self, caches: Mapping[str, torch.Tensor]) -> GraphTarget:
        return graph_target(self.runner, caches, self.config, self.composition.spec, self.dtype, self.links.tp, self.extensions)

    def _measure_graphs(self, caches: Mapping[str, torch.Tensor]) -> int:
        """Nobody asks where the size of the KV cache is given."""
        settings = self.config.kv_cache
        return 0 if settings.memory or settings.num_blocks else self._graphs.measure(self._graph_target(caches))

    def _capture_graphs(self) -> None:
        if self.runner.cache is not None and self.runner.cache.device_caches:
            self._graphs.capture(self._graph_target(self.runner.cache.device_caches))

    # measuring ------------------------------------------------------------------------------------------------------

    def _available(self, activations: int, booked: int) -> tuple[int, str]:
        settings, specs = self.config.kv_cache, self.get_kv_cache_specs()
        if self.device.type == "cpu":
            free = max(0, memory.host_memory()[0] // self.world.num_neighbours - activations)  # each worker here has a part of it
            return memory.kv_budget(settings, specs, free, self.config.scheduler, self._max_model_len, booked)
        if settings.memory is not None:
            return settings.memory, f"kv_cache.memory={settings.memory}"
        used, total = self.platform.memory()
        share = int(total * settings.memory_fraction)
        reason = (
            f"kv_cache.memory_fraction={settings.memory_fraction} of {total} bytes, less {used} in use, "
            f"{activations} for activations and {booked} booked by extensions and graphs"
        )
        return max(0, share - used - activations - booked), reason

    @property
    def _max_model_len(self) -> int:
        return self.config.max_model_len or self.composition.spec.max_model_len

    def _context(self) -> Any:
        return WorkerContext(self.config, self.composition, self.world)
