"""``pegboard generate [MODEL] --prompt TEXT``: one answer, streamed."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard.entrypoints.cli.sampling_options import (
    add_model_argument,
    add_sampling_options,
    check_sampling_options,
    sampling_params,
)

if TYPE_CHECKING:
    from pegboard.engine.llm_engine import LLMEngine

MAX_TOKENS = 256


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command ``generate``."""
    from pegboard.config.arguments import add_config_arguments

    parser: argparse.ArgumentParser = subparsers.add_parser(
        "generate",
        usage="pegboard generate [MODEL] --prompt TEXT [options]",
        help="answer a prompt",
        description="Answer one or several prompts. The answer goes to stdout as it comes, its timing to stderr.",
        epilog='example: pegboard generate smollm2 --prompt "What is the capital of France?"',
    )
    add_model_argument(parser)
    parser.add_argument(
        "-p", "--prompt", action="append", default=[], metavar="TEXT", help="the prompt; '-' reads stdin; may be repeated"
    )
    parser.add_argument(
        "-f", "--file", action="append", default=[], metavar="FILE", help="a file that holds a prompt; may be repeated"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message in front of a chat prompt")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="use the chat template, and fail without one")
    form.add_argument("--raw", action="store_true", help="continue the prompt as it is, without chat template")
    parser.add_argument("--no-stream", action="store_true", help="print the answer when it is complete")
    parser.add_argument("--json", action="store_true", help="one JSON object per answer instead of text")
    parser.add_argument("--n", type=int, default=1, metavar="N", help="answers to each prompt (default: 1); several don't stream")
    parser.add_argument("--logprobs", type=int, metavar="K", help="with --json: log probabilities of the K likeliest tokens")
    add_sampling_options(parser, MAX_TOKENS)
    add_config_arguments(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Exit status 0; 1 when an answer failed; 2 for a wrong configuration, option or prompt; 130 after Ctrl-C."""
    from pegboard.entrypoints.cli.report import reporting

    return reporting(args, "generate", _generate)


def _generate(args: argparse.Namespace) -> int:
    from pegboard.entrypoints.cli.report import start_engine

    check_sampling_options(args, n=args.n, logprobs=args.logprobs)
    if args.logprobs is not None and not args.json:
        raise ValueError("--logprobs are only shown with --json")
    if args.system and args.raw:
        raise ValueError("--system is part of a chat prompt; leave out --raw, or write it into the prompt")
    prompts = _prompts(args)
    failed = False
    with start_engine(args) as engine:
        for i, prompt in enumerate(prompts):
            if i and not args.json:
                print()
            reasons = _answer(args, engine, prompt)
            failed |= "error" in reasons
            if "abort" in reasons:
                return 130
    return 1 if failed else 0


def _answer(args: argparse.Namespace, engine: LLMEngine, prompt: str) -> set[str]:
    """Print the answers to one prompt; returns their finish reasons."""
    from pegboard.entrypoints.cli.streaming import stream

    token_ids = _token_ids(args, engine, prompt)
    params = sampling_params(args, engine, len(token_ids), MAX_TOKENS, n=args.n, logprobs=args.logprobs)
    streams = not (args.no_stream or args.json or args.n > 1)
    answers = stream(engine, {"prompt_token_ids": token_ids}, params, _write if streams else _discard)
    for answer in answers:
        if args.json:
            print(json.dumps({"prompt": prompt, **answer.as_json()}, ensure_ascii=False), flush=True)
        else:
            between = "\n" if answer.index else ""
            _write("\n" if streams else f"{between}{answer.text}\n")
        if answer.finish_reason == "error":
            print(f"pegboard generate: the answer failed: {answer.stop_reason}", file=sys.stderr)
        elif answer.interrupted:
            print("pegboard generate: interrupted", file=sys.stderr)
        print(f"[{answer.timing}]", file=sys.stderr)
    return {answer.finish_reason for answer in answers}


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = [sys.stdin.read() if text == "-" else text for text in args.prompt]
    for name in args.file:
        try:
            prompts.append(sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--file {name}: {error}") from error
    if not prompts and not sys.stdin.isatty():
        prompts.append(sys.stdin.read())
    if not prompts:
        raise ValueError("no prompt; give --prompt TEXT, --file FILE, or text on stdin")
    return prompts


def _token_ids(args: argparse.Namespace, engine: LLMEngine, prompt: str) -> list[int]:
    """The prompt in the model's chat form where it has one, unless ``--raw``."""
    from pegboard.contracts.tokenizer import NoChatTemplate

    system = [{"role": "system", "content": args.system}] if args.system else []
    if not args.raw:
        try:
            return engine.input.render_chat([*system, {"role": "user", "content": prompt}])
        except NoChatTemplate:
            if args.chat or system:
                raise
    return engine.tokenizer.encode(prompt)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _discard(text: str) -> None:
    return None
