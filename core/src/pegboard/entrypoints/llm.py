"""LLM: offline generation in three lines."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pegboard.contracts.tokenizer import Tokenizer
from pegboard.engine.errors import RequestFailed
from pegboard.engine.input import ProcessedInput
from pegboard.engine.interrupt import InterruptGuard
from pegboard.engine.llm_engine import LLMEngine
from pegboard.engine.outputs import OutputKind, RequestOutput
from pegboard.engine.prompts import Messages, Prompt
from pegboard.entrypoints.progress import Progress
from pegboard.wire import SamplingParams, SchedulerStats


class LLM:
    """A model, ready to answer. All prompts of one call run together, batched by the scheduler.

    ``config`` is a TOML or YAML file; keyword arguments are fields of ``EngineConfig`` and win over it. ``plugins`` maps
    names to plugin modules or objects that are not installed.

    ::

        with pegboard.LLM("smollm2") as llm:
            print(llm.generate("The capital of France is")[0].text)
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: str | Path | None = None,
        plugins: Mapping[str, object] | Any = None,
        **options: Any,
    ) -> None:
        """Boots the engine: returns when it is ready. Raises ``ConfigError``, ``PluginError``, ``EngineStartError``,
        or ``WorkerError`` with what a worker raised."""
        self.engine = LLMEngine(model, config=config, plugins=plugins, **options)
        self._ids = itertools.count()

    # -- generating --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        ext: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts; returns one output per prompt, in order.

        ``prompts``: one prompt or a list of them (see ``pegboard.engine.prompts.Prompt``); a list of ints is *one*
        prompt, and an empty list is no prompt at all and gives []. ``sampling_params``: one for all, or a list of the same
        length; default: what the model's generation_config recommends, over ``SamplingParams()``, with as many tokens as the
        context has room for. With ``n`` answers to a prompt all of them are in its output. ``priority``: one for all, or a list
        of the same length; smaller is served earlier. ``use_tqdm``: a progress bar on stderr; None shows it on a terminal only.

        All prompts are checked before any runs: one bad prompt raises ``RequestFailed`` (a ``ValueError``) with its ``index``,
        and nothing is generated. A prompt that fails alone while running ends with finish_reason "error" and the message in
        ``stop_reason``; the others are unharmed.

        Ctrl-C aborts all prompts of the call and leaves the engine usable. Raises ``EngineDeadError`` if the engine fails.
        """
        batch = [prompts] if _is_one_prompt(prompts) else list(prompts)
        by_default = sampling_params is None
        params = self._params(sampling_params, len(batch))
        places = _for_each("priority", priority, int, len(batch))
        processed: list[ProcessedInput] = []
        for i, (prompt, one, place) in enumerate(zip(batch, params, places, strict=True)):
            try:
                item = self.engine.input.process(
                    str(next(self._ids)), prompt, one, priority=place, cache_salt=cache_salt, ext=ext, fit=by_default
                )
            except ValueError as error:
                raise RequestFailed(i, error) from error
            processed.append(item)
        return self._run(processed, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        ext: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations: one list of messages, or a list of such lists. See ``generate`` for the rest.

        ``chat_template`` replaces the model's own; ``chat_template_kwargs`` are variables for it. Raises ``RequestFailed``
        also for messages that the template refuses.
        """
        conversations = [messages] if _is_one_conversation(messages) else list(messages)
        prompts: list[list[int]] = []
        for i, conversation in enumerate(conversations):
            try:
                token_ids = self.engine.input.render_chat(
                    conversation,  # type: ignore[arg-type]
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    tools=tools,
                    **(chat_template_kwargs or {}),
                )
            except ValueError as error:
                raise RequestFailed(i, error) from error
            prompts.append(token_ids)
        batch = [{"prompt_token_ids": ids} for ids in prompts]
        return self.generate(batch, sampling_params, use_tqdm=use_tqdm, priority=priority, cache_salt=cache_salt, ext=ext)

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        return _for_each("sampling_params", params, SamplingParams, count)

    def _run(self, processed: Sequence[ProcessedInput], use_tqdm: bool | None) -> list[RequestOutput]:
        """Run to the end; whatever stops it early takes its requests out of the engine."""
        place = {item.request.request_id: i for i, item in enumerate(processed)}
        results: dict[int, RequestOutput] = {}
        try:
            with InterruptGuard() as guard, Progress(len(processed), use_tqdm) as progress:
                self._submit(processed, guard)
                while len(results) < len(processed):
                    for output in self.engine.step():
                        if output.request_id in place:
                            results[place[output.request_id]] = output
                            progress.add(output)
                    guard.check()
        except (Exception, KeyboardInterrupt):
            self.engine.withdraw(place)
            raise
        return [results[i] for i in range(len(processed))]

    def _submit(self, processed: Sequence[ProcessedInput], guard: InterruptGuard) -> None:
        for i, item in enumerate(processed):
            try:
                self.engine.submit(item, OutputKind.FINAL)
            except ValueError as error:
                raise RequestFailed(i, error) from error
            guard.check()

    # -- the engine --------------------------------------------------------------------------------------------------

    def get_default_sampling_params(self) -> SamplingParams:
        """What ``generate`` uses without ``sampling_params``."""
        return self.engine.default_sampling_params()

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.get_tokenizer()

    def stats(self) -> SchedulerStats:
        return self.engine.stats()

    def reset_prefix_cache(self) -> bool:
        return self.engine.reset_prefix_cache()

    def collective_rpc(
        self,
        method: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """See ``Executor.collective_rpc``."""
        return self.engine.collective_rpc(method, args, kwargs, timeout=timeout)

    def shutdown(self) -> None:
        """Stop the engine and free what it holds. Idempotent."""
        self.engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _for_each(name: str, given: Any, kind: type, count: int) -> list[Any]:
    """``given`` for each of ``count`` prompts: one of its ``kind`` (or None) for all, or a list of as many."""
    if given is None or isinstance(given, kind):
        return [given] * count
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ValueError(f"{name}={given!r:.80} must be one {kind.__name__} for all prompts, or a list of them")
    if len(given) != count:
        raise ValueError(f"{len(given)} {name} for {count} prompts; give one for all, or as many as prompts")
    return list(given)


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Sequence):
        return True
    return bool(prompts) and not isinstance(prompts[0], (str, Mapping, Sequence))


def _is_one_conversation(messages: Any) -> bool:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        return True
    return not messages or isinstance(messages[0], Mapping)
