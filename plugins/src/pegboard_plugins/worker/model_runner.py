"""ModelRunner: one step, from a plan to its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pegboard.config import EngineConfig
from pegboard.contracts.attention import AttentionBackend
from pegboard.contracts.graph_runner import ForwardInputs, GraphRunner
from pegboard.contracts.logits_processor import LogitsProcessor
from pegboard.contracts.model import ForwardContext, Model, ModelSpec
from pegboard.contracts.sampler import Sampler, SamplerOutput
from pegboard.contracts.worker import WorkerExtension
from pegboard.wire import GrammarOutput, Logprobs, ModelRunnerOutput, SchedulerOutput
from pegboard_plugins.worker.attention_groups import LayerGroup, groups_in_step
from pegboard_plugins.worker.bitmasks import masks_by_row
from pegboard_plugins.worker.cache_engine import CacheEngine
from pegboard_plugins.worker.input_batch import InputBatch
from pegboard_plugins.worker.links import Intermediate, Stage
from pegboard_plugins.worker.logits_processors import LogitsProcessors
from pegboard_plugins.worker.prompt_logprobs import PromptLogprobs
from pegboard_plugins.worker.step_inputs import StepBuilder, StepInputs
from pegboard_plugins.worker.timings import StepTimings


@dataclass(slots=True)
class _HalfStep:
    """A step whose forward has run."""

    plan: SchedulerOutput
    inputs: StepInputs
    hidden: torch.Tensor | Intermediate
    """As the model returned it; on pipeline stages but the last, what has gone on to the next one."""
    logits: torch.Tensor | None
    """[N, vocab_size] of the rows that sample, or None when there are none."""


class ModelRunner:
    """Holds the resident batch and runs steps on it, one at a time.

    ``groups`` are layers that ask the same of attention; once the KV cache exists (``use_cache``) they are its groups, in its
    order. ``graphs`` runs the forwards that fit one of its graphs. ``synchronize`` waits for the device; it is called only while
    timings are on.

    Of several pipeline stages only the last one samples, has a ``sampler`` and ``processors``, and gives results. As its samples
    do not reach the others, plans bring all tokens to all stages: it does not keep its own either.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        model: Model,
        groups: Sequence[LayerGroup],
        sampler: Sampler | None,
        device: torch.device,
        extensions: Iterable[WorkerExtension] = (),
        synchronize: Callable[[], None] = lambda: None,
        processors: Mapping[str, LogitsProcessor] | None = None,
        stage: Stage | None = None,
    ) -> None:
        self.model, self.sampler, self.device = model, sampler, device
        self.groups = tuple(groups)
        self.stage = stage or Stage.only()
        self.cache: CacheEngine | None = None
        self.graphs: GraphRunner | None = None
        self.timings = StepTimings()
        self.batch = InputBatch(
            num_slots=config.scheduler.max_num_seqs,
            max_model_len=config.max_model_len or spec.max_model_len,
            block_size=config.kv_cache.block_size,
            vocab_limit=spec.vocab_size,
            seed=config.seed,
        )
        self._max_tokens = max(config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs)
        self._with_prompt_lens = spec.prompt_length_rope
        self._builder: StepBuilder | None = None
        self._prompt_logprobs = PromptLogprobs(self.batch)
        self._processors = LogitsProcessors(processors or {}, self.batch)
        self._extensions = tuple(extensions)
        self._synchronize = synchronize
        self._half: _HalfStep | None = None

    @property
    def backends(self) -> tuple[AttentionBackend, ...]:
        """One per group."""
        return tuple(group.backend for group in self.groups)

    def use_cache(self, cache: CacheEngine, groups: Sequence[LayerGroup]) -> None:
        """The KV cache is there: ``groups`` are its groups. No request may be resident."""
        self.cache, self.groups = cache, tuple(groups)
        self.batch.use_groups(len(groups))
        self._builder = StepBuilder(self.batch, self._max_tokens, self.device, self._with_prompt_lens)

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Apply ``plan`` and run the forward. Then sample, unless ``plan.grammar_slots``: None, and ``sample_tokens`` follows."""
        assert self.cache is not None, "the KV cache comes before the first step"
        if self._half is not None:
            raise ValueError(f"execute_model: step {self._half.plan.step_id} waits for its second half, sample_tokens")
        self.timings.start()
        self.batch.leave(plan)
        self.cache.apply(plan)
        self.batch.enter(plan)
        if self.stage.is_last:
            self._prompt_logprobs.update(plan)
            self._processors.update(plan)
        if plan.empty:
            return _without_tokens(plan)
        assert self._builder is not None, "it comes with the KV cache"
        inputs = self._builder.build(plan)
        self.timings.mark("prepare")
        half = self._forward(plan, inputs)
        if plan.grammar_slots:
            self._half = half
            return None
        return self._sample(half, {}) if self.stage.is_last else self._finish(half, _without_tokens(plan))

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Second half of the step that ``execute_model`` left open. Raises ``ValueError`` for a grammar of another step, or one
        that lacks a row of ``plan.grammar_slots``."""
        half, self._half = self._half, None
        if half is None:
            raise ValueError("sample_tokens: no step waits for its second half")
        self.timings.start()
        if not self.stage.is_last:
            return self._finish(half, _without_tokens(half.plan))
        return self._sample(half, masks_by_row(half.plan, half.inputs.sample_slots, grammar, self.batch.vocab_limit))

    def _forward(self, plan: SchedulerOutput, inputs: StepInputs) -> _HalfStep:
        assert self.cache is not None
        graphs = self.graphs if self.graphs is not None and self.graphs.fits(inputs.attention) else None
        attention = {} if graphs is not None else groups_in_step(self.groups, inputs.attention)
        for extension in self._extensions:
            extension.before_forward(plan)
        self.timings.mark("metadata")
        before = self.stage.receive(len(inputs.input_ids))
        self.timings.mark("receive")
        if graphs is not None:
            hidden = graphs.run(ForwardInputs(inputs.input_ids, inputs.positions, inputs.attention, inputs.prompt_lens, before))
        else:
            context = ForwardContext(attention, self.cache.device_caches, inputs.prompt_lens)
            hidden = self.model.forward(inputs.input_ids, inputs.positions, context, before)
        for extension in self._extensions:
            extension.after_forward(plan, hidden)
        logits = None
        if not self.stage.is_last:
            self.stage.send(hidden)
        elif len(inputs.sample_rows):
            assert isinstance(hidden, torch.Tensor), "the last stage returns hidden states"
            logits = self.model.compute_logits(hidden if inputs.sample_index is None else hidden[inputs.sample_index])
            if inputs.logits_index is not None:
                logits = logits[inputs.logits_index]
        if self.timings.enabled:
            self._synchronize()
        self.timings.mark("forward")
        return _HalfStep(plan, inputs, hidden, logits)

    def _sample(self, half: _HalfStep, masks: dict[int, np.ndarray]) -> ModelRunnerOutput:
        """``masks``: row among those that sample to the bitmask of its grammar."""
        plan, inputs = half.plan, half.inputs
        assert self.sampler is not None, "the last stage samples"
        assert isinstance(half.hidden, torch.Tensor), "the last stage returns hidden states"
        output = _without_tokens(plan)
        if half.logits is not None:
            batch = self.batch.sampling_batch(inputs.sample_slots, inputs.sample_lengths)
            batch.grammar_masks, batch.processors = masks, self._processors.active
            sampled = self.sampler.sample(half.logits, batch)
            half.logits = None  # its memory may be used again
            if self.stage.is_only:
                self.batch.append_sampled(inputs.sample_slots, inputs.sample_lengths, sampled.token_ids)
            _book(output, inputs.sample_rows, sampled)
        prompt_logprobs, errors = self._prompt_logprobs.compute(plan, half.hidden, self.model)
        if prompt_logprobs:
            output.prompt_logprobs = prompt_logprobs
        for row, message in errors.items():
            _fail(output, row, message)
        self.timings.mark("sample")
        for extension in self._extensions:
            extension.after_sample(plan, output)
        return self._finish(half, output)

    def _finish(self, half: _HalfStep, output: ModelRunnerOutput) -> ModelRunnerOutput:
        self.timings.mark("finish")
        self.timings.count(len(half.plan.slots), len(half.inputs.input_ids))
        return output


def _without_tokens(plan: SchedulerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput(step_id=plan.step_id, slots=plan.slots, sampled_token_ids=[[] for _ in plan.slots])


def _book(output: ModelRunnerOutput, rows: np.ndarray, sampled: SamplerOutput) -> None:
    """Put what was sampled, which is by sampling row, under the rows of the plan."""
    errors = sampled.errors
    for i, (row, token) in enumerate(zip(rows.tolist(), sampled.token_ids.tolist(), strict=True)):
        if i not in errors:
            output.sampled_token_ids[row] = [token]
    if errors:
        output.errors = {int(rows[i]): message for i, message in errors.items()}
    if sampled.logprobs:
        logprobs: dict[int, list[Logprobs]] = {int(rows[i]): [entry] for i, entry in sampled.logprobs.items()}
        output.logprobs = logprobs


def _fail(output: ModelRunnerOutput, row: int, message: str) -> None:
    """Give up a row of the plan, whatever was sampled for it."""
    output.sampled_token_ids[row] = []
    output.logprobs.pop(row, None)
    output.errors.setdefault(row, message)
