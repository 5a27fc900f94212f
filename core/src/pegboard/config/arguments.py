"""Command line options for the configuration: ``--config``, ``--set``, and a flag for every field."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, Final

from pegboard.config.allowed import allowed
from pegboard.config.fields import FieldTree, Group, Leaf
from pegboard.config.names import flag_name, near, question

_DEST: Final = "config_options"


class _Field(argparse.Action):
    """Collects ``flag -> text``; of flags for one field the later one counts."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        _collect(namespace, str(option_string), values)


class _Switch(_Field):
    """A flag without a value, for fields that are true or false."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        text = str(option_string)
        positive = text.replace("--no-", "--", 1)
        _collect(namespace, positive, str(positive == text).lower())


class _Set(argparse.Action):
    """``--set path=value``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        path, equals, value = str(values).partition("=")
        if not equals or not path.strip():
            parser.error(f"argument --set: {values!r} is not PATH=VALUE, for example scheduler.max_num_seqs=8")
        _collect(namespace, f"--set {path.strip()}", value)


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--config FILE``, ``--set PATH=VALUE`` and a flag for each of core's fields (``--scheduler.max-num-seqs``, and
    ``--max-num-seqs`` where the last part is unambiguous, ``--executor`` for ``--executor.name``), apart from flags that
    ``parser`` has already. Read them with ``cli_layer``."""
    tree = FieldTree()
    general = parser.add_argument_group("configuration")
    general.add_argument("--config", metavar="FILE", help="config file, TOML or YAML (default: the one PEGBOARD_CONFIG names)")
    general.add_argument(
        "--set",
        action=_Set,
        default=argparse.SUPPRESS,
        metavar="PATH=VALUE",
        help="set any field, also of a plugin's section: scheduler.max_num_seqs=8, plugins.NAME.KEY=VALUE",
    )
    groups: dict[str, Any] = {"": general}
    for leaf in tree.leaves():
        section = leaf.path.rpartition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(f"configuration: {section}")
        _add_flag(parser, groups[section], leaf, [flag_name(name) for name in _names(tree, leaf)])


def _names(tree: FieldTree, leaf: Leaf) -> list[str]:
    """The path, the section where the field is what a bare text for it means, and the short name. Short names like ``block``
    would say too little on a command line."""
    section = tree.find(leaf.path.rpartition(".")[0]) or tree.root
    names = [leaf.path]
    if isinstance(section, Group) and section.principal == leaf.key:
        names.append(section.path)
    if section is not tree.plugins and len(tree.aliases()[leaf.key]) == 1:
        names.append(leaf.key)
    return list(dict.fromkeys(names))


def cli_layer(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line sets, as ``load_draft`` and ``prepare`` take it for ``cli``: option as typed, to its text."""
    return dict(getattr(args, _DEST, {}))


def suggest_flag(text: str, flags: Iterable[str]) -> str:
    """``did you mean --scheduler.max-num-seqs?`` for an unknown flag among those that a command has, or nothing."""
    word = text.partition("=")[0].removeprefix("--")
    known = [flag.removeprefix("--") for flag in flags if flag.startswith("--")]
    return question([f"--{found}" for found in near(word, known)])


def _add_flag(parser: argparse.ArgumentParser, group: Any, leaf: Leaf, flags: list[str]) -> None:
    taken = parser._option_string_actions
    flags = [flag for flag in flags if flag not in taken]
    if not flags:
        return
    text = leaf.description.replace("%", "%%")
    if leaf.is_bool:
        negative = [f"--no-{flag.removeprefix('--')}" for flag in flags]
        group.add_argument(*flags, *negative, action=_Switch, nargs=0, default=argparse.SUPPRESS, dest=leaf.path, help=text)
        return
    metavar = _metavar(leaf)
    group.add_argument(*flags, action=_Field, default=argparse.SUPPRESS, dest=leaf.path, metavar=metavar, help=text)


def _metavar(leaf: Leaf) -> str:
    kind = allowed(leaf.schema())
    if kind.startswith("one of "):
        return "{" + kind.removeprefix("one of ").replace(", ", ",") + "}"
    words = {"an integer": "N", "a number": "X", "a size": "SIZE", "a list": "A,B"}
    return next((word for start, word in words.items() if kind.startswith(start)), "VALUE")


def _collect(namespace: argparse.Namespace, option: str, value: Any) -> None:
    options = dict(getattr(namespace, _DEST, {}))
    options.pop(option, None)
    setattr(namespace, _DEST, {**options, option: value})
