"""What plugins add to the command line: commands, and options of ``generate`` and ``chat``."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING

from pegboard.plugins.provider import CliCommand

if TYPE_CHECKING:
    from pegboard.plugins import PluginHost

logger = logging.getLogger(__name__)

_DESTS = "plugin_option_dests"


def plugin_commands(host: PluginHost, taken: Container[str]) -> Iterator[tuple[CliCommand, str]]:
    """Commands and who offers them, by name. One that is taken, or offered twice, is left out with a warning."""
    found: dict[str, list[tuple[CliCommand, str]]] = {}
    for record in (r for r in host.records if r.loaded and "cli_commands" in r.hooks):
        try:
            for command in host.only(record, "cli_commands"):
                if not isinstance(command, CliCommand):
                    raise TypeError(f"cli_commands() must give CliCommand objects, but gave {command!r}")
                found.setdefault(command.name, []).append((command, record.label))
        except Exception as error:
            logger.warning("commands of %s are left out: %s: %s", record.label, type(error).__name__, error)
    for name, offers in sorted(found.items()):
        who = " and ".join(label for _, label in offers)
        if name in taken:
            logger.warning("command %r of %s is left out: pegboard has a command of that name", name, who)
        elif len(offers) > 1:
            logger.warning("command %r is left out: %s both offer it; block one in PEGBOARD_PLUGINS_BLOCK", name, who)
        else:
            yield offers[0]


def add_plugin_options(parser: argparse.ArgumentParser, command: str, host: PluginHost) -> None:
    """Let plugins add options to one command. ``merge_plugin_options`` reads what was typed."""
    dests: list[str] = []
    for record in (r for r in host.records if r.loaded and "add_cli_options" in r.hooks):
        group = parser.add_argument_group(f"options of {record.label}")
        before = len(parser._actions)
        try:
            host.only(record, "add_cli_options", command=command, group=group)
        except Exception as error:
            logger.warning("options of %s are left out: %s: %s", record.label, type(error).__name__, error)
        for action in parser._actions[before:]:
            action.default = argparse.SUPPRESS  # so that only what was typed overrides file and environment
            dests.append(action.dest)
    parser.set_defaults(**{_DESTS: dests})


def merge_plugin_options(args: argparse.Namespace) -> None:
    """Put those plugin options that were typed where ``pegboard.config.arguments.cli_layer`` finds the others: path of the
    configuration to value."""
    given = {dest: getattr(args, dest) for dest in getattr(args, _DESTS, ()) if hasattr(args, dest)}
    if given:
        args.config_options = {**getattr(args, "config_options", {}), **given}
