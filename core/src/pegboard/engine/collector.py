"""RequestState: one caller's request in the front end, gathering its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pegboard.contracts.tokenizer import Tokenizer
from pegboard.engine.answer import Answer
from pegboard.engine.outputs import EchoedPrompt, Logprob, OutputKind, RequestMetrics, RequestOutput
from pegboard.engine.stats import IterationCounter
from pegboard.engine.token_names import TokenNames, named_logprobs
from pegboard.wire import EngineCoreOutput, EngineCoreRequest


class RequestState:
    """One unfinished request: news of its answers in, ``RequestOutput`` out.

    Where prompt logprobs are asked for, nothing is reported before they are there: the first piece of every answer may need
    them.
    """

    def __init__(
        self,
        request: EngineCoreRequest,
        answers: Sequence[EngineCoreRequest],
        prompt: str | None,
        tokenizer: Tokenizer,
        names: TokenNames,
        kind: OutputKind = OutputKind.CUMULATIVE,
        echo: EchoedPrompt | None = None,
    ) -> None:
        """``request`` is the caller's, ``answers`` what the engine core got for it."""
        self.request_id, self.kind = request.request_id, kind
        text = None if echo is None else echo.text
        self.answers = [Answer(a, i, tokenizer, names, text) for i, a in enumerate(answers)]
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)
        self._prompt, self._prompt_token_ids, self._echo = prompt, request.prompt_token_ids, echo
        self._names = names if request.sampling.detokenize else None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        asked = (i for i, a in enumerate(answers) if a.sampling.prompt_logprobs is not None)
        self._awaited = next(asked, None)
        """The answer that brings the prompt's logprobs, until it has."""
        self._unfinished = len(answers)
        self._news: set[int] = set()
        """Answers with something to report."""
        self._ext: dict[str, Any] = {}

    @property
    def finished(self) -> bool:
        return self._unfinished == 0

    def take(self, index: int, news: EngineCoreOutput, now: float, counter: IterationCounter) -> None:
        """Take in ``news`` of the answer ``index``, which has not ended yet, and count it."""
        answer, metrics = self.answers[index], self.metrics
        previous = answer.last_token_time
        taken = answer.take(news, now)
        self._news.add(index)
        if news.ext:
            self._ext.update(news.ext)
        if index == self._awaited and (news.new_token_ids or answer.finished):
            self._take_prompt_logprobs(news)
        counter.num_generation_tokens += taken
        if taken and previous is not None:
            counter.inter_token_latency.append(now - previous)
        if taken:
            if metrics.first_token_time is None:
                metrics.first_token_time = now
                counter.num_prompt_tokens += len(self._prompt_token_ids)
                counter.time_to_first_token.append(now - metrics.arrival_time)
            metrics.last_token_time = now
        if answer.finish_reason is not None:
            self._unfinished -= 1
            if not self._unfinished:
                metrics.finished_time = now
                counter.num_finished += 1

    def output(self) -> RequestOutput | None:
        """What to report now, by ``kind``; None when there is nothing to report yet."""
        finished = self._unfinished == 0
        if self._awaited is not None or (self.kind is OutputKind.FINAL and not finished):
            return None
        delta, answers = self.kind is OutputKind.DELTA, self.answers
        shown = [answers[i] for i in sorted(self._news)] if delta and len(answers) > 1 else answers
        self._news.clear()
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[answer.report(delta) for answer in shown],
            finished=finished,
            num_cached_tokens=min([a.num_cached_tokens for a in answers if a.num_cached_tokens is not None], default=0),
            metrics=self._metrics_now(),
            ext=dict(self._ext),
            prompt_logprobs=self._prompt_logprobs,
            echo=self._echo,
        )

    def _metrics_now(self) -> RequestMetrics:
        """A copy that the caller may keep."""
        m = self.metrics
        preemptions = sum([answer.num_preemptions for answer in self.answers])
        return RequestMetrics(m.arrival_time, m.first_token_time, m.last_token_time, m.finished_time, preemptions)

    def _take_prompt_logprobs(self, news: EngineCoreOutput) -> None:
        self._awaited = None
        if news.new_token_ids:  # else it ended before they were known
            self._prompt_logprobs = [None, *(named_logprobs(entry, self._names) for entry in news.prompt_logprobs)]
