"""From exceptions to one line and an exit status; and starting an engine from a command line."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pegboard.engine.llm_engine import LLMEngine

USAGE, FAILURE, INTERRUPTED = 2, 1, 130


def start_engine(args: argparse.Namespace) -> LLMEngine:
    """An engine as the command line, the environment and the config file say. ``args.model_ref`` wins over ``--model``."""
    from pegboard.config.arguments import cli_layer
    from pegboard.engine.bootstrap import prepare
    from pegboard.engine.llm_engine import LLMEngine

    layer = cli_layer(args)
    if args.model_ref is not None:
        layer["model"] = args.model_ref
    return LLMEngine.from_prepared(prepare(file=args.config, cli=layer))


def reporting(args: argparse.Namespace, command: str, work: Callable[[argparse.Namespace], int]) -> int:
    """Run ``work``; what it raises becomes one message on stderr and an exit status: 2 for what the user can put right
    (configuration, model name, prompt), 1 for what failed. With ``-v`` the traceback comes too."""
    verbose = getattr(args, "verbose", False)
    logger = logging.getLogger("pegboard")
    if verbose and not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    try:
        return work(args)
    except KeyboardInterrupt:
        print(f"pegboard {command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        raise  # ``main`` ends quietly, as for every command
    except Exception as error:
        if verbose:
            import traceback

            traceback.print_exc()
        else:
            print(f"pegboard {command}: {describe(error)}", file=sys.stderr)
        return USAGE if _is_users(error) else FAILURE


def describe(error: BaseException) -> str:
    """One message; the type is named where the text alone would not explain itself."""
    from pegboard.engine.errors import EngineDeadError, EngineStartError

    text = str(error).strip()
    if text and (_is_users(error) or isinstance(error, (EngineDeadError, EngineStartError))):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_users(error: BaseException) -> bool:
    from pegboard.plugins.errors import PluginError

    return isinstance(error, (ValueError, PluginError))
