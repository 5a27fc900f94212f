"""Output processing: from the engine core's news to RequestOutput. Detokenizes, finds stop strings, keeps the times."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pegboard.contracts.tokenizer import Tokenizer
from pegboard.engine.detokenizer import IncrementalDetokenizer
from pegboard.engine.outputs import CompletionOutput, Logprob, OutputKind, RequestMetrics, RequestOutput
from pegboard.engine.stats import IterationCounter
from pegboard.engine.stop import StopMatcher
from pegboard.wire import EngineCoreOutput, EngineCoreRequest, FinishReason, Logprobs


@dataclass(slots=True)
class _Answer:
    """Growing state of one answer, and how much of it the caller has seen."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    seen_text: int = 0
    seen_tokens: int = 0


class RequestState:
    """One unfinished request in the front end."""

    def __init__(
        self, request: EngineCoreRequest, prompt: str | None, tokenizer: Tokenizer, kind: OutputKind = OutputKind.CUMULATIVE
    ) -> None:
        params = request.sampling
        self.request, self.prompt, self.kind = request, prompt, kind
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)
        self.num_cached_tokens = 0
        self.ext: dict[str, Any] = {}
        self.answer = _Answer()
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._stop = StopMatcher(params.stop, params.include_stop_str_in_output)
        if params.logprobs is not None:
            self.answer.logprobs, self.answer.cumulative_logprob = [], 0.0

    def update(self, news: EngineCoreOutput, now: float) -> int:
        """Take in ``news``; returns how many of its tokens were taken (those after a stop string are not)."""
        taken = 0
        for i, token_id in enumerate(news.new_token_ids):
            last = i == len(news.new_token_ids) - 1
            hidden = last and news.finish_reason is FinishReason.STOP and not self._stop_text_shown
            self._append(token_id, news.logprobs[i] if i < len(news.logprobs) else None, hidden)
            taken += 1
            if self._stop.matched is not None:
                break
        if taken:
            self.metrics.first_token_time = self.metrics.first_token_time or now
            self.metrics.last_token_time = now
        self.num_cached_tokens = max(self.num_cached_tokens, news.num_cached_tokens)
        self.ext.update(news.ext)
        self.metrics.num_preemptions = max(self.metrics.num_preemptions, news.num_preemptions)
        if self._stop.matched is None and news.finish_reason is not None:
            self._end(news.finish_reason, news.stop_reason)
        if self._stop.matched is not None:
            self.answer.finish_reason, self.answer.stop_reason = FinishReason.STOP, self._stop.matched
        if self.answer.finish_reason is not None:
            self.metrics.finished_time = now
        return taken

    def output(self) -> RequestOutput | None:
        """What to report now, by ``kind``; None when there is nothing to report yet."""
        answer, finished = self.answer, self.answer.finish_reason is not None
        if self.kind is OutputKind.FINAL and not finished:
            return None
        delta = self.kind is OutputKind.DELTA
        text_from, tokens_from = (answer.seen_text, answer.seen_tokens) if delta else (0, 0)
        answer.seen_text, answer.seen_tokens = len(answer.text), len(answer.token_ids)
        completion = CompletionOutput(
            index=0,
            text=answer.text[text_from:],
            token_ids=answer.token_ids[tokens_from:],
            cumulative_logprob=answer.cumulative_logprob,
            logprobs=None if answer.logprobs is None else answer.logprobs[tokens_from:],
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
        )
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[completion],
            finished=finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=replace(self.metrics),
            ext=dict(self.ext),
        )

    @property
    def _stop_text_shown(self) -> bool:
        return self.request.sampling.include_stop_str_in_output

    @property
    def _armed(self) -> bool:
        """Stop strings count once ``min_tokens`` tokens are there."""
        return len(self.answer.token_ids) >= self.request.sampling.min_tokens

    def _append(self, token_id: int, logprobs: Logprobs | None, hidden: bool) -> None:
        answer = self.answer
        answer.token_ids.append(token_id)
        if answer.logprobs is not None and logprobs is not None:
            answer.logprobs.append(named_logprobs(logprobs, self._tokenizer))
            answer.cumulative_logprob = (answer.cumulative_logprob or 0.0) + logprobs.logprobs[0]
        if not hidden:
            answer.text += self._stop.feed(self._detokenizer.push(token_id), self._armed)

    def _end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.answer.text += self._stop.feed(self._detokenizer.flush(), self._armed)
        if self._stop.matched is None:
            self.answer.text += self._stop.release()
            own_stop = reason is not FinishReason.STOP or stop_reason in self.request.sampling.stop_token_ids
            self.answer.finish_reason, self.answer.stop_reason = reason, stop_reason if own_stop else None


class OutputProcessor:
    """All unfinished requests of one front end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, RequestState] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._states

    def __len__(self) -> int:
        return len(self._states)

    @property
    def request_ids(self) -> list[str]:
        return list(self._states)

    def add(self, request: EngineCoreRequest, prompt: str | None, kind: OutputKind) -> None:
        self._states[request.request_id] = RequestState(request, prompt, self._tokenizer, kind)

    def process(self, news: Iterable[EngineCoreOutput]) -> ProcessedOutputs:
        """Take in a step's news. News of unknown requests (ended here before) are dropped."""
        now = time.time()
        result = ProcessedOutputs()
        for item in news:
            state = self._states.get(item.request_id)
            if state is None:
                continue
            previous = state.metrics.last_token_time
            taken = state.update(item, now)
            _count(result.counter, state, taken, previous, now)
            ended_here = state.answer.finish_reason is not None
            if ended_here:
                del self._states[item.request_id]
                if item.finish_reason is None:
                    result.to_abort.append(item.request_id)
            output = state.output()
            if output is not None:
                result.outputs.append(output)
        return result

    def abort(self, request_ids: Sequence[str]) -> list[RequestOutput]:
        """End requests from this side: one last output each, with what there is."""
        news = [EngineCoreOutput(request_id=i, finish_reason=FinishReason.ABORT) for i in request_ids]
        return self.process(news).outputs

    def clear(self) -> None:
        self._states.clear()


@dataclass(slots=True)
class ProcessedOutputs:
    """``to_abort``: requests that ended here (stop strings) and must still be ended in the core."""

    outputs: list[RequestOutput] = field(default_factory=list)
    to_abort: list[str] = field(default_factory=list)
    counter: IterationCounter = field(default_factory=IterationCounter)


def _count(counter: IterationCounter, state: RequestState, taken: int, previous: float | None, now: float) -> None:
    counter.num_generation_tokens += taken
    counter.num_finished += state.answer.finish_reason is not None
    if taken and previous is None:
        counter.num_prompt_tokens += len(state.request.prompt_token_ids)
        counter.time_to_first_token.append(now - state.metrics.arrival_time)
    elif taken and previous is not None:
        counter.inter_token_latency.append(now - previous)


def named_logprobs(entry: Logprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """The wire's columns as a dict, with ranks and texts: chosen token first, alternatives in falling order."""
    chosen, *others = zip(entry.token_ids, entry.logprobs, strict=True)
    named = {chosen[0]: Logprob(chosen[1], entry.rank, tokenizer.decode([chosen[0]], skip_special_tokens=False))}
    rank = 0
    for token_id, value in others:
        rank += 1 + (rank + 1 == entry.rank)
        named[token_id] = Logprob(value, rank, tokenizer.decode([token_id], skip_special_tokens=False))
    return named
