"""Answer: one answer of a request in the front end, and how much of it the caller has seen."""

from __future__ import annotations

from pegboard.contracts.tokenizer import Tokenizer
from pegboard.engine.answer_text import LocatedText
from pegboard.engine.outputs import CompletionOutput, Logprob
from pegboard.engine.stop import StopMatcher
from pegboard.engine.token_names import TokenNames, named_logprobs
from pegboard.wire import EngineCoreOutput, EngineCoreRequest, FinishReason, Logprobs


class Answer:
    """Takes in news of one request of the engine core: detokenizes, finds stop strings, names log probabilities."""

    def __init__(
        self, request: EngineCoreRequest, index: int, tokenizer: Tokenizer, names: TokenNames, prompt_text: str | None = None
    ) -> None:
        """``prompt_text`` (None: no echo) comes before the answer's own text; no stop string is looked for in it."""
        params = request.sampling
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.last_token_time: float | None = None
        self.num_cached_tokens: int | None = None
        """None until there is news."""
        self.num_preemptions = 0
        self._params, self._ends = params, frozenset(request.stop_token_ids)
        self._names = names if params.detokenize else None
        self._pieces = [prompt_text or ""]
        """The text so far."""
        self._length = len(self._pieces[0])
        shown = (params.skip_special_tokens, params.spaces_between_special_tokens)
        self._located = LocatedText(tokenizer, *shown, start=self._length) if params.detokenize else None
        self._stop = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._offsets: list[int] | None = None if params.logprobs is None else []
        self._cumulative_logprob = None if params.logprobs is None else 0.0
        self._shows_prompt = prompt_text is not None
        self._seen_pieces = self._seen_tokens = 0
        self._seen = False

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def take(self, news: EngineCoreOutput, now: float) -> int:
        """Take in ``news``; returns how many of its tokens were taken (those after a stop string are not)."""
        taken = 0
        for i, token_id in enumerate(news.new_token_ids):
            last = i == len(news.new_token_ids) - 1
            ends = last and news.finish_reason is FinishReason.STOP and token_id in self._ends
            hidden = ends and not self._params.include_stop_str_in_output
            self._append(token_id, news.logprobs[i] if i < len(news.logprobs) else None, hidden)
            taken += 1
            if self._stop.matched is not None:
                break
        if taken:
            self.last_token_time = now
        self.num_cached_tokens = max(self.num_cached_tokens or 0, news.num_cached_tokens)
        self.num_preemptions = max(self.num_preemptions, news.num_preemptions)
        if self._stop.matched is None and news.finish_reason is not None:
            self._end(news.finish_reason, news.stop_reason)
        if self._stop.matched is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, self._stop.matched
        if self.finished and self._offsets is not None:  # those of tokens that a stop string has cut off
            self._offsets = [min(offset, self._length) for offset in self._offsets]
        return taken

    def report(self, delta: bool) -> CompletionOutput:
        """All of it so far, or with ``delta`` what is new since the last report."""
        pieces_from, tokens_from = (self._seen_pieces, self._seen_tokens) if delta else (0, 0)
        with_prompt = self._shows_prompt and not (delta and self._seen)
        text = "".join(self._pieces[pieces_from:])
        if not delta:
            self._pieces = [text]
        self._seen_pieces, self._seen_tokens, self._seen = len(self._pieces), len(self.token_ids), True
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[tokens_from:],
            cumulative_logprob=self._cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs[tokens_from:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            text_offsets=None if self._offsets is None else self._offsets[tokens_from:],
            with_prompt=with_prompt,
        )

    @property
    def _armed(self) -> bool:
        """Stop strings count once ``min_tokens`` tokens are there."""
        return len(self.token_ids) >= self._params.min_tokens

    def _append(self, token_id: int, logprobs: Logprobs | None, hidden: bool) -> None:
        self.token_ids.append(token_id)
        if self._logprobs is not None and self._offsets is not None and logprobs is not None:
            self._logprobs.append(named_logprobs(logprobs, self._names))
            self._offsets.append(self._located.locate(token_id) if self._located is not None else 0)
            self._cumulative_logprob = (self._cumulative_logprob or 0.0) + logprobs.logprobs[0]
        if self._located is not None and not hidden:
            self._show(self._stop.feed(self._located.push(token_id), self._armed))

    def _show(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self._length += len(piece)

    def _end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        if self._located is not None:
            self._show(self._stop.feed(self._located.flush(), self._armed))
        if self._stop.matched is None:
            self._show(self._stop.release())
            own_stop = reason is not FinishReason.STOP or stop_reason in self._params.stop_token_ids
            self.finish_reason, self.stop_reason = reason, stop_reason if own_stop else None
