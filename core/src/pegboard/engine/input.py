"""Input processing: from a prompt and sampling parameters to a checked EngineCoreRequest. What is wrong with a request
is found here, before it can meet others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pegboard.contracts.tokenizer import Tokenizer
from pegboard.engine.bad_words import BadWords
from pegboard.engine.echo import echoed_prompt
from pegboard.engine.extensions import RequestExtensions
from pegboard.engine.info import EngineInfo
from pegboard.engine.outputs import EchoedPrompt
from pegboard.engine.prompts import Messages, ParsedPrompt, check_messages, parse_prompt
from pegboard.engine.room import output_room, truncated
from pegboard.engine.seeds import RequestSeeds
from pegboard.engine.token_names import TokenNames
from pegboard.engine.vocabulary import Vocabulary, check_token_ids
from pegboard.wire import EngineCoreRequest, GrammarSpec, SamplingParams
from pegboard.wire.sampling_params import cache_salt_problem

Validate = Callable[[EngineCoreRequest], None]
"""Raises ``ValueError`` for what a plugin refuses."""


@dataclass(frozen=True, slots=True)
class ProcessedInput:
    """A checked request under its caller's id, still with ``sampling.n`` answers in one; the text it came from (None for token
    ids); and what ``echo`` shows of the prompt."""

    request: EngineCoreRequest
    prompt: str | None
    echo: EchoedPrompt | None = None


@dataclass(frozen=True, slots=True)
class Checks:
    """What parts and plugins have to say about requests. All of them raise ``ValueError`` for what they refuse.

    ``grammar`` validates the language of ``structured_outputs``; None: nothing can serve any. ``params`` are those of the logits
    processors in use. ``request`` sees the finished request.
    """

    extensions: RequestExtensions | None = None
    grammar: Callable[[GrammarSpec], None] | None = None
    params: Sequence[Callable[[SamplingParams], None]] = ()
    request: Validate | None = None


class InputProcessor:
    """Turns prompts into requests. Thread-safe as far as the tokenizer is; holds nothing of a request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        info: EngineInfo,
        eos_token_ids: Sequence[int] = (),
        checks: Checks | None = None,
        seed: int | None = None,
        names: TokenNames | None = None,
    ) -> None:
        """``seed``: the engine's, from which requests without one get theirs; None draws them from entropy."""
        self._tokenizer, self._info = tokenizer, info
        self._eos = tuple(eos_token_ids)
        self._checks = checks or Checks()
        self._seeds = RequestSeeds(seed)
        self._names = names or TokenNames(tokenizer)
        self._vocabulary = Vocabulary(info.vocab_size, tokenizer.vocab_size)
        self._bad_words = BadWords(tokenizer, self._vocabulary.choosable)

    def process(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        ext: Mapping[str, Any] | None = None,
        fit: bool = False,
    ) -> ProcessedInput:
        """Check everything and tokenize. ``prompt``: see ``pegboard.engine.prompts.Prompt``. Extras in a prompt dict win over the
        arguments, and these over ``params``; the fields of ``ext`` from all three are merged. ``fit``: nobody chose
        ``max_tokens``; it is lowered to what the context has room for.

        Raises:
            ValueError: naming the field, its value, the limit and what to do.
        """
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id={request_id!r} must be a non-empty string")
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, got {type(params).__name__}")
        parsed = parse_prompt(prompt)
        all_ids = self._token_ids(parsed)
        token_ids = truncated(all_ids, params, self._info)
        stop_token_ids = self._stop_token_ids(params)
        bad_word_ids = self._bad_words.token_ids(params.bad_words)
        self._vocabulary.check_params(params, stop_token_ids, bad_word_ids)
        sampling = self._sampling(params, ext, parsed.extras)
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling=sampling,
            stop_token_ids=stop_token_ids,
            max_tokens=output_room(len(token_ids), params, self._info, fit),
            arrival_time=time.time() if arrival_time is None else arrival_time,
            priority=_check_priority(_first(parsed.extras.get("priority"), priority, params.priority)),
            cache_salt=_check_salt(_first(parsed.extras.get("cache_salt"), cache_salt, params.cache_salt)),
            bad_word_ids=bad_word_ids,
            grammar=self._grammar(params),
            ext=sampling.ext,
        )
        if self._checks.request is not None:
            self._checks.request(request)
        written = parsed.text if len(token_ids) == len(all_ids) else None
        echo = self._echo(token_ids, written, params) if params.echo else None
        return ProcessedInput(request, parsed.text, echo)

    def render_chat(self, messages: Messages, **template_arguments: Any) -> list[int]:
        """Token ids of a conversation. ``template_arguments``: see ``Tokenizer.apply_chat_template``.

        Raises ``ValueError`` for messages that are none, and ``ChatTemplateError``.
        """
        return self._tokenizer.apply_chat_template(check_messages(messages), **template_arguments)

    def _token_ids(self, parsed: ParsedPrompt) -> list[int]:
        if parsed.text is not None:
            name, token_ids = "prompt", self._tokenizer.encode(parsed.text)
        elif parsed.messages is not None:
            name, token_ids = "messages", self.render_chat(parsed.messages)
        else:
            assert parsed.token_ids is not None
            name, token_ids = "prompt_token_ids", list(parsed.token_ids)
        if not token_ids:
            raise ValueError(f"{name} is empty (zero tokens); give at least one token")
        return self._vocabulary.check_prompt(name if name == "prompt_token_ids" else f"tokens of {name}", token_ids)

    def _echo(self, token_ids: list[int], text: str | None, params: SamplingParams) -> EchoedPrompt:
        located = params.prompt_logprobs is not None
        return echoed_prompt(self._tokenizer, self._names, token_ids, text, params.skip_special_tokens, located)

    def _stop_token_ids(self, params: SamplingParams) -> list[int]:
        own = check_token_ids("stop_token_ids", params.stop_token_ids, self._vocabulary.choosable)
        return list(dict.fromkeys(own if params.ignore_eos else [*self._eos, *own]))

    def _sampling(self, params: SamplingParams, ext: Any, extras: Mapping[str, Any]) -> SamplingParams:
        """``params`` as the engine core gets them: with a seed, the merged and checked ``ext``, and no ``structured_outputs``."""
        changes: dict[str, Any] = {"structured_outputs": None}
        given = [e for e in (params.ext, ext, extras.get("ext")) if e is not None and e != {}]
        if given:
            changes["ext"] = self._extensions(*given)
        if params.seed is None:
            changes["seed"] = self._seeds.draw()
        sampling = msgspec.structs.replace(params, **changes)
        for check in self._checks.params:
            check(sampling)
        return sampling

    def _extensions(self, *given: Any) -> dict[str, Any]:
        if self._checks.extensions is None:
            raise ValueError(f"ext={given[0]!r:.80}: no plugin in use takes fields of requests; leave it out")
        return self._checks.extensions.check(*given)

    def _grammar(self, params: SamplingParams) -> GrammarSpec | None:
        if params.structured_outputs is None:
            return None
        spec = params.structured_outputs.spec
        field = f"structured_outputs.{'json' if spec.kind == 'json_schema' else spec.kind}"
        if self._checks.grammar is None:
            raise ValueError(
                f"{field} needs a grammar backend, and there is none: install a plugin that has one, or name it as "
                "structured_outputs.backend ('pegboard plugins show grammar' lists what is installed)"
            )
        try:
            self._checks.grammar(spec)
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from error
        return spec


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _check_priority(priority: Any) -> int:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ValueError(f"priority={priority!r} must be an integer; smaller is served earlier")
    if not -(2**63) <= priority < 2**63:
        raise ValueError(f"priority={priority!r} must be between {-(2**63)} and {2**63 - 1}")
    return priority


def _check_salt(salt: Any) -> str | None:
    problem = cache_salt_problem(salt)
    if problem is not None:
        raise ValueError(problem)
    return salt  # type: ignore[no-any-return]
