"""``pegboard``: finds the command, imports only what it needs, and turns errors of users into one line and exit status 2.

Plugins are loaded here for their own commands alone, and for the options that they add to ``generate`` and ``chat``; commands
that need an engine load theirs by themselves.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from pegboard.plugins import PluginHost

COMMANDS: Final = {
    "generate": ("generate_cmd", "complete one prompt"),
    "chat": ("chat_cmd", "talk to a model"),
    "config": ("config_cmd", "explain, describe and check the configuration"),
    "plugins": ("plugins_cmd", "list, show and check plugins"),
}
"""Command to the module in this package that has it, and one line of help."""
WITH_PLUGIN_OPTIONS: Final = frozenset({"generate", "chat"})

USER_ERROR: Final = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 fine, 1 a command's own no, 2 an error in what the user asked for."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _set_up_logging()
    try:
        return int(_run(_parse(arguments)) or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of a pipe went away: not an error, but the interpreter must not try to flush into it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if not _is_user_error(error):
            raise
        logging.getLogger("pegboard").debug("traceback", exc_info=error)
        print(f"pegboard: error: {error}", file=sys.stderr)
        return USER_ERROR


def _run(args: argparse.Namespace) -> int | None:
    from pegboard.entrypoints.cli.plugin_options import merge_plugin_options

    merge_plugin_options(args)
    return args.run(args)  # type: ignore[no-any-return]


def _is_user_error(error: Exception) -> bool:
    """Errors whose text tells a user what to change; anything else keeps its traceback."""
    from pegboard.contracts.model_source import ModelNotFound
    from pegboard.plugins.errors import PluginError

    known: tuple[type[Exception], ...] = (PluginError, ModelNotFound)
    if "pegboard.config.errors" in sys.modules:
        from pegboard.config.errors import ConfigError

        known = (*known, ConfigError)
    return isinstance(error, known)


class _Parser(argparse.ArgumentParser):
    """Options are written in full: an abbreviation would change its meaning when a plugin adds a flag. Commands inherit it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser: argparse.ArgumentParser = _Parser(
        prog="pegboard",
        description="An LLM inference engine in which every part is a plugin.",
        epilog="pegboard COMMAND --help tells more about a command.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    typed = next((a for a in arguments if not a.startswith("-")), None)
    if not arguments:
        arguments = ["--help"]
    for name, (module, summary) in COMMANDS.items():
        if name == typed:
            command = importlib.import_module(f"pegboard.entrypoints.cli.{module}")
            command.add_parser(subparsers)
            own = subparsers.choices[name]
            own.set_defaults(run=command.run)
            if name in WITH_PLUGIN_OPTIONS:
                from pegboard.entrypoints.cli.plugin_options import add_plugin_options

                add_plugin_options(own, name, _host(quiet=True))
        else:
            subparsers.add_parser(name, help=summary, add_help=False)
    if typed not in COMMANDS and arguments[0] != "--version":
        _add_plugin_commands(subparsers, _host(quiet=False))
        _refuse_unknown(parser, subparsers, typed)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse_arguments(_typed_parser(parser, args), unknown)
    return args


def _typed_parser(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.ArgumentParser:
    """The parser of the innermost command that was typed, such as ``plugins list``."""
    for action in parser._actions:
        chosen = getattr(args, action.dest, None)
        if isinstance(action, argparse._SubParsersAction) and chosen in action.choices:
            return _typed_parser(action.choices[chosen], args)
    return parser


def _refuse_arguments(parser: argparse.ArgumentParser, unknown: list[str]) -> None:
    """``parser`` is the one of the command, so that its usage is shown, and its flags are what is suggested."""
    from pegboard.config.arguments import suggest_flag

    guesses = [
        guess for text in unknown if text.startswith("--") and (guess := suggest_flag(text, parser._option_string_actions))
    ]
    parser.error(f"unknown arguments: {' '.join(unknown)}" + (f" ({' '.join(guesses)})" if guesses else ""))


def _host(quiet: bool) -> PluginHost:
    """Plugins as the environment allows them. The commands of a broken one are missing; it is told why, unless ``quiet``."""
    from pegboard.plugins import PluginHost

    host = PluginHost.inspect()
    for warning in [] if quiet else host.warnings:
        logging.getLogger("pegboard.plugins").warning(warning)
    return host


def _add_plugin_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], host: PluginHost) -> None:
    from pegboard.entrypoints.cli.plugin_options import plugin_commands

    for command, label in plugin_commands(host, taken=COMMANDS):
        parser = subparsers.add_parser(command.name, help=command.summary, description=command.summary, epilog=f"from {label}")
        if command.add_arguments is not None:
            command.add_arguments(parser)
        parser.set_defaults(run=command.run)


def _refuse_unknown(
    parser: argparse.ArgumentParser, subparsers: argparse._SubParsersAction[argparse.ArgumentParser], typed: str | None
) -> None:
    if typed is not None and typed not in subparsers.choices:
        from pegboard.plugins.suggestions import did_you_mean

        known = ", ".join(subparsers.choices)
        parser.error(f"no command is called {typed!r}{did_you_mean(typed, subparsers.choices)} (commands: {known})")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from pegboard.plugins.discovery import host_version

        print(f"pegboard {host_version()}")
        parser.exit()


class _Stderr(logging.StreamHandler[TextIO]):
    """``pegboard: warning: …`` on what is ``sys.stderr`` at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return f"pegboard: {record.levelname.lower()}: {super().format(record)}"


def _set_up_logging() -> None:
    """Warnings and worse to stderr, or from the level in ``PEGBOARD_LOG_LEVEL`` on."""
    logger = logging.getLogger("pegboard")
    name = os.environ.get("PEGBOARD_LOG_LEVEL", "").strip().upper()
    level = logging.getLevelNamesMapping().get(name)
    if not any(isinstance(h, _Stderr) for h in logger.handlers):
        logger.addHandler(_Stderr())
    logger.setLevel(logging.WARNING if level is None else level)
    if name and level is None:
        logger.warning("PEGBOARD_LOG_LEVEL=%s is no level; use debug, info, warning or error", name)


if __name__ == "__main__":
    sys.exit(main())
