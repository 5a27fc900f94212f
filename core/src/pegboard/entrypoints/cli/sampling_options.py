"""Arguments that ``generate`` and ``chat`` share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pegboard.engine.llm_engine import LLMEngine
    from pegboard.wire import SamplingParams

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """The model as the first word of the command line, and ``-v``."""
    text = "folder, hub id, .gguf file, or a name that a plugin resolves"
    parser.add_argument("model_ref", nargs="?", metavar="MODEL", help=text)
    parser.add_argument("-v", "--verbose", action="store_true", help="log what is done, and show the traceback of an error")


def add_sampling_options(parser: argparse.ArgumentParser, default_max_tokens: int) -> None:
    """Options named as the fields of SamplingParams. None means: as the model recommends, else greedy."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "-n",
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"most tokens of an answer (default: {default_max_tokens}, or what the context has room for)",
    )
    group.add_argument(
        "--temperature", type=float, metavar="T", help="0 always takes the likeliest token (default: the model's own, else 0)"
    )
    group.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens that make up this probability")
    group.add_argument("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    group.add_argument("--min-p", type=float, metavar="P", help="leave out tokens less likely than P times the likeliest")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1 discourages tokens that were there already")
    group.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end the answer before TEXT; may be repeated")


def sampling_params(args: argparse.Namespace, engine: LLMEngine, prompt_len: int, default_max_tokens: int) -> SamplingParams:
    """The model's recommendation, changed by the options. Without either, greedy: a command line should repeat itself.

    Raises ``ValueError`` for a value out of range.
    """
    fields = _given(args)
    room = max(1, engine.info.max_tokens - prompt_len)
    fields["max_tokens"] = min(default_max_tokens, room) if args.max_tokens is None else args.max_tokens
    return engine.default_sampling_params(default_temperature=0.0, **fields)


def check_sampling_options(args: argparse.Namespace) -> None:
    """Raise ``ValueError`` for a value out of range, before a model is loaded."""
    from pegboard.wire import SamplingParams

    SamplingParams(**_given(args), max_tokens=args.max_tokens)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    return {**{name: getattr(args, name) for name in _FIELDS if getattr(args, name) is not None}, "stop": tuple(args.stop)}
