"""load_draft and load_config: all layers, in their order."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from pegboard.config.draft import ConfigDraft
from pegboard.config.errors import ConfigError
from pegboard.config.models import EngineConfig
from pegboard.config.sources import CONFIG_VARIABLE, Given, from_command_line, from_environment, from_file, from_keywords


def load_draft(
    *,
    file: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    cli: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> ConfigDraft:
    """A draft from defaults < ``file`` < ``env`` < ``cli`` < ``kwargs``.

    Args:
        file: a TOML or YAML file, by suffix; None takes the one that ``PEGBOARD_CONFIG`` names, if any.
        env: environment variables; None takes the process's own.
        cli: what ``cli_layer`` collected, or dotted paths to values.
        kwargs: fields, sections (as dicts, models, or their principal value), and short names where they are unambiguous.

    Raises nothing: what is wrong is kept in the draft and raised by ``build``, all at once.
    """
    variables = os.environ if env is None else env
    chosen = file if file is not None else variables.get(CONFIG_VARIABLE) or None
    draft = ConfigDraft()
    if chosen is not None:
        try:
            _add(draft, from_file(chosen))
        except ConfigError as exc:
            draft.add_problems(exc.problems)
    _add(draft, from_environment(variables))
    _add(draft, from_command_line(cli or {}))
    _add(draft, from_keywords(kwargs))
    return draft


def load_config(
    *,
    file: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    cli: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> EngineConfig:
    """``load_draft(...).build()``: without plugins, so their sections are taken as they are. Raises ``ConfigError``."""
    return load_draft(file=file, env=env, cli=cli, **kwargs).build()


def _add(draft: ConfigDraft, source: Iterable[Given]) -> None:
    for given in source:
        draft.add(given)
