"""Checks across fields. Few, because most combinations work: what limits what is decided where it is used.

Allowed on purpose: ``max_num_batched_tokens`` below ``max_num_seqs`` (a round of decodes then takes several steps),
``num_blocks`` below ``max_num_seqs`` (fewer requests run at once), ``num_blocks`` together with ``memory`` (it overrides it).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pegboard.config.models import EngineConfig, PluginsConfig
from pegboard.plugins.provider import Problem


def cross_field_problems(config: EngineConfig) -> Iterator[Problem]:
    """Fields that are right by themselves and cannot be together. ``Problem.where`` is the path of the first of them."""
    yield from plugin_list_problems(config.plugins)


def plugin_list_problems(plugins: PluginsConfig) -> Iterator[Problem]:
    """Contradictions among the lists of plugins; they hold before any plugin is loaded."""
    blocked = {_normalized(name): name for name in plugins.block}
    for name in plugins.enabled:
        if _normalized(name) in blocked:
            yield Problem(
                "plugins.enabled", f"{name!r} is enabled and blocked", "take it out of plugins.enabled or plugins.block"
            )
    if not plugins.required:
        return
    from packaging.requirements import InvalidRequirement, Requirement

    for text in plugins.required:
        try:
            name = Requirement(text).name
        except InvalidRequirement as exc:
            reason = str(exc).partition("\n")[0]
            yield Problem("plugins.required", f"{text!r} is no requirement: {reason}", "write 'name' or 'name>=version'")
            continue
        if _normalized(name) in blocked:
            yield Problem(
                "plugins.required", f"{name!r} is required and blocked", "take it out of plugins.required or plugins.block"
            )


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
