"""Output processing: from the engine core's news to the RequestOutputs of a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pegboard.contracts.tokenizer import Tokenizer
from pegboard.engine.collector import RequestState
from pegboard.engine.outputs import EchoedPrompt, OutputKind, RequestOutput
from pegboard.engine.stats import IterationCounter
from pegboard.engine.token_names import TokenNames
from pegboard.wire import EngineCoreOutput, EngineCoreRequest, FinishReason

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ProcessedOutputs:
    """``to_abort``: ids in the engine core of answers that ended here (stop strings) and must still be ended there."""

    outputs: list[RequestOutput] = field(default_factory=list)
    to_abort: list[str] = field(default_factory=list)
    counter: IterationCounter = field(default_factory=IterationCounter)


class OutputProcessor:
    """All unfinished requests of one front end, by their callers' ids. The engine core has ids of its own for their answers."""

    def __init__(self, tokenizer: Tokenizer, names: TokenNames | None = None) -> None:
        self._tokenizer = tokenizer
        self._names = names or TokenNames(tokenizer)
        self._requests: dict[str, RequestState] = {}
        self._places: dict[str, tuple[RequestState, int]] = {}
        """Id in the engine core to the request and which of its answers; unfinished ones only."""
        self._core_ids: dict[str, list[str]] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def request_ids(self) -> list[str]:
        return list(self._requests)

    def core_ids(self, request_id: str) -> list[str]:
        """Ids in the engine core of a request's answers, as far as they have not ended. [] for an unknown request."""
        return [i for i in self._core_ids.get(request_id, ()) if i in self._places]

    def add(
        self,
        request: EngineCoreRequest,
        answers: Sequence[EngineCoreRequest],
        prompt: str | None,
        kind: OutputKind,
        echo: EchoedPrompt | None = None,
    ) -> None:
        """Expect news of ``answers``, which the engine core got for the caller's ``request``."""
        state = RequestState(request, answers, prompt, self._tokenizer, self._names, kind, echo)
        self._requests[state.request_id] = state
        self._core_ids[state.request_id] = [a.request_id for a in answers]
        self._places.update({a.request_id: (state, i) for i, a in enumerate(answers)})

    def process(self, news: Iterable[EngineCoreOutput]) -> ProcessedOutputs:
        """Take in a step's news. News of answers that ended here before are dropped. One whose text the tokenizer fails to make
        ends with ``FinishReason.ERROR``; the others are untouched."""
        now = time.time()
        result = ProcessedOutputs()
        touched: dict[RequestState, None] = {}
        for item in news:
            place = self._places.get(item.request_id)
            if place is None:
                continue
            state, index = place
            try:
                state.take(index, item, now, result.counter)
            except Exception as error:
                log.warning("the text of an answer to request %r cannot be made", state.request_id, exc_info=True)
                why = f"its text cannot be made: {type(error).__name__}: {error}"
                failed = EngineCoreOutput(request_id=item.request_id, finish_reason=FinishReason.ERROR, stop_reason=why)
                state.take(index, failed, now, result.counter)
            touched[state] = None
            if state.answers[index].finished:
                del self._places[item.request_id]
                if item.finish_reason is None:
                    result.to_abort.append(item.request_id)
        for state in touched:
            if state.finished:
                del self._requests[state.request_id], self._core_ids[state.request_id]
            output = state.output()
            if output is not None:
                result.outputs.append(output)
        return result

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests from this side: one last output each, with what there is."""
        ids = [core_id for request_id in request_ids for core_id in self.core_ids(request_id)]
        return self.process([EngineCoreOutput(request_id=i, finish_reason=FinishReason.ABORT) for i in ids]).outputs

    def clear(self) -> None:
        """Nothing more will come for any request."""
        self._requests.clear()
        self._core_ids.clear()
        self._places.clear()
