"""One answer on a terminal: streamed, interruptible, timed."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pegboard.engine.llm_engine import LLMEngine
    from pegboard.engine.prompts import Prompt
    from pegboard.wire import SamplingParams

_ids = (f"cli-{secrets.token_hex(4)}-{n}" for n in itertools.count())
"""Unlike those of an earlier run: an unseeded request draws by its id, and should not repeat what it drew then."""


@dataclass(slots=True)
class Answer:
    """What came out, and how fast. Seconds from the moment the request was handed over."""

    prompt_tokens: int
    cached_tokens: int = 0
    pieces: list[str] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str = ""
    stop_reason: int | str | None = None
    interrupted: bool = False
    seconds: float = 0.0
    first_token_seconds: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.pieces)

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
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.num_tokens,
            "seconds": round(self.seconds, 4),
            "first_token_seconds": round(self.first_token_seconds, 4),
        }


def stream(engine: LLMEngine, prompt: Prompt, params: SamplingParams, write: Callable[[str], None]) -> Answer:
    """Run one prompt to its end; ``write`` gets each piece of text when it is certain.

    Ctrl-C ends the answer and nothing else: ``Answer.interrupted`` says so. Raises ``ValueError`` for a refused prompt and
    ``EngineDeadError``.
    """
    from pegboard.engine.interrupt import InterruptGuard
    from pegboard.engine.outputs import OutputKind

    request_id = next(_ids)
    processed = engine.input.process(request_id, prompt, params)
    answer = Answer(prompt_tokens=len(processed.request.prompt_token_ids))
    started = time.perf_counter()
    try:
        engine.submit(processed, OutputKind.DELTA)
        with InterruptGuard() as guard:
            while not answer.finish_reason:
                if guard.interrupted and not answer.interrupted:
                    answer.interrupted = True
                    engine.abort_request(request_id)
                for output in engine.step():
                    _take(answer, output.outputs[0], output.num_cached_tokens, time.perf_counter() - started, write)
    except BaseException:
        engine.withdraw([request_id])
        raise
    return answer


def _take(answer: Answer, piece: Any, cached_tokens: int, seconds: float, write: Callable[[str], None]) -> None:
    if piece.token_ids and not answer.num_tokens:
        answer.first_token_seconds = seconds
    answer.num_tokens += len(piece.token_ids)
    answer.cached_tokens = cached_tokens
    answer.seconds = seconds
    if piece.finish_reason is not None:
        answer.finish_reason, answer.stop_reason = str(piece.finish_reason), piece.stop_reason
    if piece.text:
        answer.pieces.append(piece.text)
        write(piece.text)
