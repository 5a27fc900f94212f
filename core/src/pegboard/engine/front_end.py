"""The front end's side of a composition: what is asked about a request before the engine core gets it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pegboard.contracts.tokenizer import Tokenizer
from pegboard.engine.eos import eos_token_ids
from pegboard.engine.extensions import RequestExtensions
from pegboard.engine.info import EngineInfo
from pegboard.engine.input import Checks, InputProcessor
from pegboard.engine.token_names import TokenNames
from pegboard.plugins.checks import load_target
from pegboard.plugins.errors import PluginError
from pegboard.wire import EngineCoreRequest, GrammarSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from pegboard.contracts.grammar import GrammarBackend
    from pegboard.plugins import Composition
    from pegboard.wire import SamplingParams


def input_processor(composition: Composition, info: EngineInfo, tokenizer: Tokenizer, names: TokenNames) -> InputProcessor:
    """An input processor with the checks of every part and plugin in use. Raises ``PluginError`` for one that cannot be used."""
    hook = composition.host.hook

    def validate_request(request: EngineCoreRequest) -> None:
        hook.validate_request(request=request)

    checks = Checks(
        extensions=RequestExtensions(composition.host),
        grammar=GrammarCheck(composition) if composition.parts.get("grammar") is not None else None,
        params=_params_checks(composition),
        request=validate_request,
    )
    eos = eos_token_ids(composition.spec, composition.source, tokenizer)
    return InputProcessor(tokenizer, info, eos, checks, info.seed, names)


class GrammarCheck:
    """Validates grammars with the composition's backend, which is made when it is first needed."""

    def __init__(self, composition: Composition) -> None:
        self._composition = composition
        self._backend: GrammarBackend | None = None

    def __call__(self, spec: GrammarSpec) -> None:
        """Raises ``ValueError`` for a grammar that cannot be served, also where the backend itself cannot be had."""
        if self._backend is None:
            try:
                self._backend = self._composition.create("grammar")
            except (PluginError, ImportError) as error:
                raise ValueError(f"the grammar backend cannot be used: {error}") from error
        assert self._backend is not None
        self._backend.validate(spec)


def _params_checks(composition: Composition) -> list[Callable[[SamplingParams], None]]:
    """``validate_params`` of the logits processors in use."""
    targets: list[Any] = [load_target(p, composition.host) for p in composition.extensions.get("logits_processor", ())]
    return [target.validate_params for target in targets if hasattr(target, "validate_params")]
