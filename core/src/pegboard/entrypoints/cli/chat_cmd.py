"""``pegboard chat [MODEL]``: a conversation."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from pegboard.entrypoints.cli.sampling_options import (
    add_model_argument,
    add_sampling_options,
    check_sampling_options,
    sampling_params,
)

if TYPE_CHECKING:
    from pegboard.engine.llm_engine import LLMEngine

MAX_TOKENS = 1024
HELP = """\
/reset         forget the conversation (the system message stays)
/system TEXT   set the system message and forget the conversation; without TEXT, remove it
/help          this text
/exit          leave, like Ctrl-D
Ctrl-C stops the answer that is being written."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command ``chat``."""
    from pegboard.config.arguments import add_config_arguments

    parser: argparse.ArgumentParser = subparsers.add_parser(
        "chat",
        usage="pegboard chat [MODEL] [options]",
        help="talk with a model",
        description="Talk with a model. Messages come from the terminal, or one per line from stdin. /help lists the commands.",
    )
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--timing", action="store_true", help="print the timing of each answer to stderr")
    add_sampling_options(parser, MAX_TOKENS)
    add_config_arguments(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Exit status 0; 1 when a message from a file or pipe failed; 2 for a wrong configuration or option."""
    from pegboard.entrypoints.cli.report import reporting

    return reporting(args, "chat", _chat)


def _chat(args: argparse.Namespace) -> int:
    from pegboard.entrypoints.cli.report import start_engine

    check_sampling_options(args)
    with start_engine(args) as engine:
        conversation = Conversation(args, engine)
        if conversation.interactive:
            print(f"{engine.config.model} listens; /help lists the commands", file=sys.stderr)
        while (line := conversation.read()) is not None:
            if line.startswith("/"):
                if conversation.command(line):
                    break
            elif line:
                conversation.say(line)
        return 1 if conversation.failed and not conversation.interactive else 0


class Conversation:
    """Messages so far, and where they come from and go to."""

    def __init__(self, args: argparse.Namespace, engine: LLMEngine) -> None:
        self._args, self._engine = args, engine
        self._system: str | None = args.system
        self._messages: list[dict[str, str]] = []
        self.interactive = sys.stdin.isatty()
        self.failed = False

    def read(self) -> str | None:
        """The next line, stripped; None at the end of input."""
        if not self.interactive:
            line = sys.stdin.readline()
            return line.strip() if line else None
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() line editing and history
        try:
            return input("> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit leaves)", file=sys.stderr)
            return ""

    def command(self, line: str) -> bool:
        """Carry out a ``/command``; True when it ends the conversation."""
        name, _, text = line.partition(" ")
        if name in ("/exit", "/quit"):
            return True
        if name == "/system":
            self._system = text.strip() or None
        if name in ("/system", "/reset"):
            self._messages.clear()
        elif name == "/help":
            print(HELP, file=sys.stderr)
        else:
            self._complain(f"unknown command {name}; /help lists the commands")
        return False

    def say(self, text: str) -> None:
        """Send one message and write the answer. A message that fails is taken back."""
        from pegboard.entrypoints.cli.streaming import stream

        messages = [*self._messages, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self._system}] if self._system else []
        try:
            token_ids = self._engine.input.render_chat([*system, *messages])
            params = sampling_params(self._args, self._engine, len(token_ids), MAX_TOKENS)
            [answer] = stream(self._engine, {"prompt_token_ids": token_ids}, params, _write)
        except ValueError as error:
            self._complain(f"{error}" + ("; /reset starts over" if self._messages else ""))
            return
        _write("\n")
        if answer.finish_reason == "error":
            self._complain(f"the answer failed: {answer.stop_reason}")
            return
        if answer.interrupted:
            print("(stopped)", file=sys.stderr)
        if self._args.timing:
            print(f"[{answer.timing}]", file=sys.stderr)
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]

    def _complain(self, text: str) -> None:
        self.failed = True
        print(f"pegboard chat: {text}", file=sys.stderr)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
