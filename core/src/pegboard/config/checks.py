"""Checks across fields. Few, because most combinations work: what limits what is decided where it is used.

Allowed on purpose: ``max_num_batched_tokens`` below ``max_num_seqs`` (a round of decodes then takes several steps),
``num_blocks`` below ``max_num_seqs`` (fewer requests run at once), ``num_blocks`` together with ``memory`` (it overrides it).
"""

from __future__ import annotations

from collections.abc import Iterator

from pegboard.config.models import EngineConfig, PluginsConfig
from pegboard.plugins.discovery import normalized
from pegboard.plugins.errors import PluginError
from pegboard.plugins.provider import Problem
from pegboard.plugins.requirements import parse_requirement


def cross_field_problems(config: EngineConfig) -> Iterator[Problem]:
    """Fields that are right by themselves and cannot be together. ``Problem.where`` is the path of the first of them."""
    yield from _compilation_problems(config)
    yield from _plugin_list_problems(config.plugins)


def _compilation_problems(config: EngineConfig) -> Iterator[Problem]:
    settings, most = config.compilation, config.scheduler.max_num_seqs
    if settings.enforce_eager and settings.torch_compile:
        yield Problem(
            "compilation.torch_compile",
            "nothing is compiled while compilation.enforce_eager is true",
            "set one of the two to false",
        )
    if settings.capture_sizes is not None and (large := [size for size in settings.capture_sizes if size > most]):
        yield Problem(
            "compilation.capture_sizes",
            f"no step has {large[0]} rows: scheduler.max_num_seqs is {most}",
            f"take out sizes above {most}, or raise scheduler.max_num_seqs",
        )


def _plugin_list_problems(plugins: PluginsConfig) -> Iterator[Problem]:
    """Contradictions among the lists of plugins; they hold before any plugin is loaded."""
    blocked = {normalized(name) for name in plugins.block}
    for name in plugins.enabled:
        if normalized(name) in blocked:
            yield Problem(
                "plugins.enabled", f"{name!r} is enabled and blocked", "take it out of plugins.enabled or plugins.block"
            )
    for text in plugins.required:
        try:
            name = parse_requirement(text).name
        except PluginError as error:
            yield Problem("plugins.required", str(error))
            continue
        if normalized(name) in blocked:
            yield Problem(
                "plugins.required", f"{name!r} is required and blocked", "take it out of plugins.required or plugins.block"
            )
