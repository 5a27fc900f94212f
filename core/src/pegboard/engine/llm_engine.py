"""LLMEngine: the synchronous front end. Requests in, ``step()``, outputs out."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard.contracts.tokenizer import Tokenizer
from pegboard.engine.client import EngineCoreClient, InProcessClient
from pegboard.engine.core import EngineCore
from pegboard.engine.defaults import recommended_sampling
from pegboard.engine.errors import EngineDeadError
from pegboard.engine.expansion import Expander
from pegboard.engine.front_end import input_processor
from pegboard.engine.input import ProcessedInput
from pegboard.engine.output import OutputProcessor
from pegboard.engine.outputs import OutputKind, RequestOutput
from pegboard.engine.prompts import Prompt
from pegboard.engine.stats import StatLoggers
from pegboard.engine.token_names import TokenNames
from pegboard.wire import SamplingParams, SchedulerStats

if TYPE_CHECKING:
    from pegboard.config import EngineConfig
    from pegboard.engine.bootstrap import Prepared
    from pegboard.plugins import Composition, PluginHost

log = logging.getLogger(__name__)


class LLMEngine:
    """One engine and its front end, driven by the caller: every ``step`` advances all requests.

    Methods are called from one thread. After a failure of the engine every method that needs it raises
    ``EngineDeadError``, and no request is left waiting.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: str | Path | None = None,
        plugins: Mapping[str, object] | None = None,
        **options: Any,
    ) -> None:
        """The arguments of ``LLM``: ``config`` is a TOML or YAML file, keyword arguments are fields of ``EngineConfig`` and win
        over it, ``plugins`` maps names to plugin modules or objects that are not installed."""
        from pegboard.engine.bootstrap import prepare

        if model is not None:
            options["model"] = model
        self._boot(prepare(file=config, plugins=plugins, **options).composition)

    @classmethod
    def from_prepared(cls, prepared: Prepared) -> LLMEngine:
        """An engine from what ``pegboard.engine.bootstrap.prepare`` returned."""
        engine = cls.__new__(cls)
        engine._boot(prepared.composition)
        return engine

    @classmethod
    def from_config(cls, config: EngineConfig, host: PluginHost | None = None) -> LLMEngine:
        """An engine for a finished configuration; ``host`` defaults to one with the installed plugins."""
        from pegboard.plugins import compose

        engine = cls.__new__(cls)
        engine._boot(compose(config, host))
        return engine

    def _boot(self, composition: Composition) -> None:
        self.composition, self.config = composition, composition.config
        with ThreadPoolExecutor(1, thread_name_prefix="pegboard-tokenizer") as pool:
            tokenizer = pool.submit(composition.create, "tokenizer")
            self.client: EngineCoreClient = InProcessClient(EngineCore(composition.config, composition))
        try:
            self.tokenizer: Tokenizer = tokenizer.result()
            self._agree_on_vocabulary()
            self._build_front_end()
        except BaseException:
            self.client.shutdown()
            raise

    def _build_front_end(self) -> None:
        composition, names = self.composition, TokenNames(self.tokenizer)
        self.info = self.client.info
        self.input = input_processor(composition, self.info, self.tokenizer, names)
        self._expand = Expander(composition.host, self.info)
        self._outputs = OutputProcessor(self.tokenizer, names)
        self._recommended = recommended_sampling(composition.source.generation_config)
        self._ended_outside: list[RequestOutput] = []
        self._stat_loggers = StatLoggers(composition.create_all("stat_logger"), self.config.observability.log_interval)

    def _agree_on_vocabulary(self) -> None:
        """Ids that only pad the embedding have no text and are never chosen; ids beyond it cannot be computed."""
        embedding, known = self.composition.spec.vocab_size, self.tokenizer.vocab_size
        if known > embedding:
            log.warning(
                "the tokenizer knows %d ids, the model's embedding has %d: prompts with ids from %d on are refused",
                known, embedding, embedding,
            )  # fmt: skip
        elif known < embedding:
            self.client.collective_rpc("set_vocab_limit", (known,))

    # -- requests ----------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        kind: OutputKind | None = None,
        arrival_time: float | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        ext: Mapping[str, Any] | None = None,
    ) -> None:
        """Check and queue one request. ``params`` default to ``default_sampling_params()``, with as many tokens of those as the
        context has room for, ``kind`` to ``params.output_kind``; for the others see ``InputProcessor.process``.

        Raises:
            ValueError: the request is refused; no other request notices.
            PluginError: a plugin that expands requests gave what cannot be used.
            EngineDeadError: the engine has failed.
        """
        processed = self.input.process(
            request_id,
            prompt,
            self.default_sampling_params() if params is None else params,
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=cache_salt,
            ext=ext,
            fit=params is None,
        )
        self.submit(processed, kind)

    def submit(self, processed: ProcessedInput, kind: OutputKind | None = None) -> None:
        """Queue a request that ``input.process`` has checked. Raises as ``add_request``.

        The engine core knows each of its answers by an id of its own (see ``Expander`` and ``core_ids``), so that an id that has
        ended can be used again at once: nothing that still comes for the earlier request reaches the later one.
        """
        request = processed.request
        if request.request_id in self._outputs:
            raise ValueError(
                f"request id {request.request_id!r} is still in use; choose another one, or abort that request first"
            )
        kind = request.sampling.output_kind if kind is None else OutputKind(kind)
        answers = self._expand(request)
        try:
            for answer in answers:
                self.client.add_request(answer)
            self._outputs.add(request, answers, processed.prompt, kind, processed.echo)
        except BaseException:  # Ctrl-C, say: nothing may go on that nobody listens to
            self.client.abort_requests([answer.request_id for answer in answers])
            raise

    def core_ids(self, request_id: str) -> list[str]:
        """Ids under which the engine core, its events and its plugins know the unfinished answers of a request."""
        return self._outputs.core_ids(request_id)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests, with all their answers. Their last output, with finish_reason "abort", comes from the next ``step``,
        before any of a request that uses the id again. Ids that are unknown or have ended are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        known = [i for i in dict.fromkeys(ids) if i in self._outputs]
        if known:
            self.client.abort_requests([core_id for i in known for core_id in self._outputs.core_ids(i)])
            self._ended_outside += self._outputs.abort(known)

    def withdraw(self, request_ids: Iterable[str]) -> None:
        """End requests whose caller has gone: like ``abort_request``, but nothing is reported. Does not raise."""
        gone = dict.fromkeys(request_ids)
        try:
            self.abort_request(gone)
        except EngineDeadError:
            self._drop_all()
        self._ended_outside = [o for o in self._ended_outside if o.request_id not in gone]

    def abort_all(self) -> None:
        """End every request."""
        self.abort_request(self._outputs.request_ids)

    def has_unfinished_requests(self) -> bool:
        """True while ``step`` has something to do or to report."""
        return bool(self._ended_outside) or len(self._outputs) > 0 or self.client.has_requests()

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._outputs)

    def step(self) -> list[RequestOutput]:
        """Advance the engine by one step; returns what is new, by each request's ``OutputKind``.

        Raises ``EngineDeadError`` when the engine fails: all requests have ended with it.
        """
        try:
            news = self.client.get_outputs(with_stats=bool(self._stat_loggers))
            processed = self._outputs.process(news.outputs)
            if processed.to_abort:
                self.client.abort_requests(processed.to_abort)
        except EngineDeadError:
            self._drop_all()
            raise
        if news.stats is not None:
            self._stat_loggers.record(news.stats, processed.counter)
        ended, self._ended_outside = self._ended_outside, []
        return ended + processed.outputs

    # -- what there is -----------------------------------------------------------------------------------------------

    def default_sampling_params(self, *, default_temperature: float = 1.0, **changes: Any) -> SamplingParams:
        """``SamplingParams`` as the model's generation_config recommends, with ``changes``. ``default_temperature`` holds where
        it recommends none."""
        return SamplingParams(**{"temperature": default_temperature, **self._recommended, **changes})

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def stats(self) -> SchedulerStats:
        """Gauges and counters at this moment."""
        return self.client.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False, and nothing changed, while requests are running."""
        return self.client.reset_prefix_cache()

    def collective_rpc(
        self,
        method: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call a declared worker method, or a function of the worker, on every worker; see ``Executor.collective_rpc``."""
        return self.client.collective_rpc(method, args, kwargs, timeout=timeout)

    def check_health(self) -> None:
        """Return when the engine answers; raise ``EngineDeadError`` otherwise."""
        self.client.check_health()

    def shutdown(self) -> None:
        """Stop the engine. Idempotent. Unfinished requests are dropped."""
        self._drop_all()
        self.client.shutdown()

    def _drop_all(self) -> None:
        """Nothing more will come for any request."""
        self._outputs.clear()
        self._ended_outside.clear()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
