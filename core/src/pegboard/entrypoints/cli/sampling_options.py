"""Arguments that ``generate`` and ``chat`` share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pegboard.engine.llm_engine import LLMEngine
    from pegboard.wire import SamplingParams, StructuredOutputs

_OPTIONS: Final[tuple[tuple[str, type, str, str], ...]] = (
    ("temperature", float, "T", "0 always takes the likeliest token (default: the model's own, else 0; 1 for several answers)"),
    ("top_p", float, "P", "sample from the likeliest tokens that make up this probability"),
    ("top_k", int, "K", "sample from the K likeliest tokens"),
    ("min_p", float, "P", "leave out tokens less likely than P times the likeliest"),
    ("repetition_penalty", float, "X", "above 1 discourages tokens that were there already"),
    ("presence_penalty", float, "X", "above 0 discourages tokens that the answer has"),
    ("frequency_penalty", float, "X", "the same, for each time that the answer has them"),
    ("seed", int, "N", "makes sampling repeatable"),
    ("min_tokens", int, "N", "least tokens of an answer"),
)
"""Fields of SamplingParams with one value: type, what stands for it, and help."""
_LISTS: Final = ("stop", "bad_words")


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
    for name, kind, shown, text in _OPTIONS:
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=shown, help=text)
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end the answer before TEXT; may be repeated")
    group.add_argument(
        "--bad-word", action="append", default=[], dest="bad_words", metavar="TEXT", help="never say TEXT; may be repeated"
    )
    _add_language_options(parser)


def _add_language_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("form of the answer", "at most one of these").add_mutually_exclusive_group()
    group.add_argument("--json-schema", metavar="FILE", help="JSON that keeps to the schema in FILE")
    group.add_argument("--json-object", action="store_true", help="any JSON object")
    group.add_argument("--regex", metavar="REGEX", help="a text that matches")
    group.add_argument("--choice", action="append", metavar="TEXT", help="this text, or one of several when repeated")
    group.add_argument("--grammar", metavar="FILE", help="a text of the grammar in FILE")


def sampling_params(
    args: argparse.Namespace, engine: LLMEngine, prompt_len: int, default_max_tokens: int, **more: Any
) -> SamplingParams:
    """The model's recommendation, changed by the options and by ``more``. Where none of them says a temperature, one answer is
    greedy, because a command line should repeat itself, and several are drawn.

    Raises ``ValueError`` for a value out of range.
    """
    fields = {**_given(args), **more}
    room = max(1, engine.info.max_tokens - prompt_len)
    fields["max_tokens"] = min(default_max_tokens, room) if args.max_tokens is None else args.max_tokens
    return engine.default_sampling_params(default_temperature=0.0 if fields.get("n", 1) == 1 else 1.0, **fields)


def check_sampling_options(args: argparse.Namespace, **more: Any) -> None:
    """Raise ``ValueError`` for a value out of range and a file that cannot be used, before a model is loaded."""
    from pegboard.wire import SamplingParams

    SamplingParams(**_given(args), max_tokens=args.max_tokens, **more)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    fields = {name: getattr(args, name) for name, *_ in _OPTIONS if getattr(args, name) is not None}
    fields |= {name: tuple(getattr(args, name)) for name in _LISTS}
    return {**fields, "structured_outputs": _language(args)}


def _language(args: argparse.Namespace) -> StructuredOutputs | None:
    from pegboard.wire import StructuredOutputs

    if args.json_schema is not None:
        return _from_file("--json-schema", args.json_schema, "json")
    if args.grammar is not None:
        return _from_file("--grammar", args.grammar, "grammar")
    if args.regex is not None:
        return StructuredOutputs(regex=args.regex)
    if args.choice is not None:
        return StructuredOutputs(choice=tuple(args.choice))
    return StructuredOutputs(json_object=True) if args.json_object else None


def _from_file(option: str, name: str, field: str) -> StructuredOutputs:
    from pegboard.wire import StructuredOutputs

    try:
        language: dict[str, Any] = {field: Path(name).read_text(encoding="utf-8")}
        return StructuredOutputs(**language)
    except (OSError, ValueError) as error:
        raise ValueError(f"{option} {name}: {error}") from error
