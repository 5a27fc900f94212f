"""``pegboard config explain | schema | check``. Nothing here imports torch, or anything heavy before a command runs."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pegboard.engine.bootstrap import Checked
    from pegboard.plugins.provider import Problem


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command ``config``."""
    from pegboard.config.arguments import add_config_arguments

    parser: argparse.ArgumentParser = subparsers.add_parser(
        "config",
        help="explain, describe and check the configuration",
        description="Explain, describe and check the configuration.",
    )
    actions = parser.add_subparsers(dest="config_action", required=True, metavar="ACTION")
    explain = actions.add_parser(
        "explain",
        help="each field, its value, and who set it",
        description="Show each field, its value, and who set it: default, file, environment variable, option or plugin.",
    )
    explain.add_argument("paths", nargs="*", metavar="PATH", help="fields or sections, for example scheduler (default: all)")
    explain.add_argument("-v", "--verbose", action="store_true", help="also what was overridden, and what a field is for")
    explain.add_argument("--json", action="store_true", help="as JSON")
    add_config_arguments(explain)
    schema = actions.add_parser("schema", help="all fields, with those of installed plugins")
    schema.add_argument("--json", action="store_true", help="as JSON Schema, for editors and validators")
    check = actions.add_parser("check", help="check a config file; exit status 2 and all problems if it is wrong")
    check.add_argument("file", metavar="FILE", help="config file, TOML or YAML")
    check.add_argument("--json", action="store_true", help="problems as JSON")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the chosen action. Exit status: 0 fine, 2 the configuration has problems."""
    return {"explain": _explain, "schema": _schema, "check": _check}[args.config_action](args)


def _explain(args: argparse.Namespace) -> int:
    from pegboard.config.arguments import cli_layer
    from pegboard.config.errors import ConfigError
    from pegboard.config.explain import as_data, as_text, problem_data, select
    from pegboard.engine.bootstrap import check

    checked = check(file=args.config, cli=cli_layer(args), all_sections=True)
    problems = _problems(checked)
    try:
        leaves = select(checked.draft, args.paths)
    except ConfigError as exc:
        if not args.json:
            return _report(exc.problems)
        leaves, problems = [], exc.problems
    if args.json:
        data = {"fields": as_data(checked.draft, leaves), "problems": [problem_data(p) for p in problems]}
        print(json.dumps(data, indent=2))
        return 2 if problems else 0
    print(as_text(checked.draft, leaves, args.verbose))
    return _report(problems)


def _schema(args: argparse.Namespace) -> int:
    from pegboard.config.schema import json_schema, table
    from pegboard.engine.bootstrap import check

    checked = check(all_sections=True)
    host = checked.host
    names = host.providers if host is not None else None
    if args.json:
        print(json.dumps(json_schema(checked.draft.tree, names), indent=2))
    else:
        print(table(checked.draft.tree, names))
    return 0


def _check(args: argparse.Namespace) -> int:
    from pegboard.config.explain import problem_data
    from pegboard.engine.bootstrap import check

    checked = check(file=args.file, env={})
    problems = _problems(checked)
    if args.json:
        print(json.dumps({"file": args.file, "problems": [problem_data(p) for p in problems]}, indent=2))
        return 2 if problems else 0
    if not problems:
        print(f"{args.file}: fine")
    return _report(problems)


def _problems(checked: Checked) -> list[Problem]:
    """All but a missing model: what is looked at here need not be the whole configuration."""
    unset = not checked.draft.is_set("model")
    return [p for p in checked.problems if not (unset and p.where == "model")]


def _report(problems: Iterable[Problem]) -> int:
    from pegboard.config.errors import ConfigError

    found = list(problems)
    if not found:
        return 0
    print(ConfigError(found), file=sys.stderr)
    return 2
