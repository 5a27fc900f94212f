"""Answers on a terminal: streamed, interruptible, timed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pegboard.engine.completion_logprobs import CompletionLogprobs, completion_logprobs
from pegboard.engine.interrupt import InterruptGuard
from pegboard.engine.outputs import CompletionOutput, OutputKind, RequestOutput

if TYPE_CHECKING:
    from pegboard.engine.llm_engine import LLMEngine
    from pegboard.engine.prompts import Prompt
    from pegboard.wire import SamplingParams

_ids = (f"cli-{n}" for n in itertools.count())


@dataclass(slots=True)
class Answer:
    """What came out, and how fast. Seconds from the moment the request was handed over."""

    prompt_tokens: int
    index: int = 0
    cached_tokens: int = 0
    pieces: list[str] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str = ""
    stop_reason: int | str | None = None
    seconds: float = 0.0
    first_token_seconds: float = 0.0
    logprobs: CompletionLogprobs | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def interrupted(self) -> bool:
        return self.finish_reason == "abort"

    @property
    def timing(self) -> str:
        """``12 tokens in 0.45 s (26.7 tok/s), first after 0.12 s; prompt 31 tokens``, with the rate of the whole answer."""
        rate = self.num_tokens / self.seconds if self.seconds > 0 else 0.0
        cached = f", {self.cached_tokens} cached" if self.cached_tokens else ""
        return (
            f"{self.num_tokens} tokens in {self.seconds:.2f} s ({rate:.1f} tok/s), "
            f"first after {self.first_token_seconds:.2f} s; prompt {self.prompt_tokens} tokens{cached}"
        )

    def as_json(self) -> dict[str, Any]:
        """``logprobs`` is there where they were asked for."""
        found = {
            "index": self.index,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.num_tokens,
            "seconds": round(self.seconds, 4),
            "first_token_seconds": round(self.first_token_seconds, 4),
        }
        return found if self.logprobs is None else {**found, "logprobs": asdict(self.logprobs)}

    def take(self, output: RequestOutput, piece: CompletionOutput, seconds: float) -> None:
        """Add one piece, ``seconds`` after the start."""
        if piece.token_ids and not self.num_tokens:
            self.first_token_seconds = seconds
        self.num_tokens += len(piece.token_ids)
        self.cached_tokens, self.seconds = output.num_cached_tokens, seconds
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = str(piece.finish_reason), piece.stop_reason
        if piece.text:
            self.pieces.append(piece.text)
        if piece.logprobs is not None:
            self.logprobs = self.logprobs or CompletionLogprobs()
            self.logprobs.extend(completion_logprobs(output, piece))


def stream(engine: LLMEngine, prompt: Prompt, params: SamplingParams, write: Callable[[str], None]) -> list[Answer]:
    """Run one prompt to the end of all its answers; ``write`` gets each piece of the first one's text when it is certain.

    Ctrl-C ends the answers and nothing else: ``Answer.interrupted`` says so. Raises ``ValueError`` for a refused prompt and
    ``EngineDeadError``.
    """
    request_id = next(_ids)
    processed = engine.input.process(request_id, prompt, params)
    prompt_tokens = len(processed.request.prompt_token_ids)
    answers: dict[int, Answer] = {}
    interrupted = finished = False
    started = time.perf_counter()
    try:
        engine.submit(processed, OutputKind.DELTA)
        with InterruptGuard() as guard:
            while not finished:
                if guard.interrupted and not interrupted:
                    interrupted = True
                    engine.abort_request(request_id)
                for output in engine.step():
                    finished = output.finished
                    for piece in output.outputs:
                        answer = answers.setdefault(piece.index, Answer(prompt_tokens, piece.index))
                        answer.take(output, piece, time.perf_counter() - started)
                        if piece.text and piece.index == 0:
                            write(piece.text)
    except BaseException:
        engine.withdraw([request_id])
        raise
    return [answers[index] for index in sorted(answers)]
