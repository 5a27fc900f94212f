"""``pegboard plugins list | show | check | doctor``. ``list`` and ``show`` load no part, so neither torch nor a part's errors."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pegboard.config import PluginsConfig
    from pegboard.plugins import PluginHost


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command ``plugins``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plugins",
        help="list, show and check plugins",
        description="What is installed, what it offers, and whether it works.",
        epilog="PEGBOARD_PLUGINS_ALLOW and PEGBOARD_PLUGINS_BLOCK (comma-separated entry points or distributions) limit what is "
        "loaded; an empty PEGBOARD_PLUGINS_ALLOW loads none but the standard parts.",
    )
    actions = parser.add_subparsers(dest="plugins_action", required=True, metavar="ACTION")
    _action(actions, "list", "every installed plugin, its status, and what it offers")
    show = _action(actions, "show", "one plugin, provider or kind of part")
    show.add_argument("name", metavar="NAME", help="a plugin, a distribution, a provider, or a kind such as executor")
    show.add_argument(
        "--model", metavar="MODEL", help="with NAME 'attention': which backends can serve this model on this machine, and why not"
    )
    check = _action(actions, "check", "load what one plugin offers, or one provider, and compare it with the contracts")
    check.add_argument("name", metavar="NAME", help="a plugin, a distribution, or a provider")
    doctor = _action(actions, "doctor", "everything that is wrong; exit status 1 if anything is")
    doctor.add_argument("--targets", action="store_true", help="also load every part (may import torch)")
    parser.set_defaults(run=run)
    return parser


def _action(actions: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    parser.add_argument("--config", metavar="FILE", help="config file whose plugins section applies")
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 fine, 1 something is wrong with a plugin, 2 nothing is called so."""
    with _clean_stdout() as out:
        actions = {"list": _list, "show": _show, "check": _check, "doctor": _doctor}
        status, data, lines = actions[args.plugins_action](args, _load(args.config))
        if args.json:
            print(json.dumps(data, indent=2), file=out)
        else:
            for line in lines:
                print(line, file=out)
    return status


@contextlib.contextmanager
def _clean_stdout() -> Iterator[Any]:
    """A stream for the answer alone: whatever plugins write to stdout, from C or a child process too, goes to stderr."""
    try:
        descriptor = sys.stdout.fileno()
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):  # stdout is no file, for example under a test's capture
        yield sys.stdout
        return
    kept = os.dup(descriptor)
    os.dup2(sys.stderr.fileno(), descriptor)
    try:
        with os.fdopen(os.dup(kept), "w", encoding=sys.stdout.encoding) as out:
            yield out
    finally:
        sys.stdout.flush()
        os.dup2(kept, descriptor)
        os.close(kept)


def _load(config: str | None) -> PluginHost:
    """The host that the configuration and the environment ask for, with its problems; the engine would refuse them."""
    from pegboard.plugins import PluginHost

    settings = any(name == "PEGBOARD_CONFIG" or name.startswith("PEGBOARD_PLUGINS__") for name in os.environ)
    return PluginHost.inspect(_settings(config) if config or settings else None)


def _settings(config: str | None) -> PluginsConfig:
    """The plugins section; what is wrong elsewhere is for ``config check``, but a file that cannot be read has no section.

    Imported only when there is something to read: pydantic costs more than everything else here.
    """
    from pegboard.config import ConfigError, PluginsConfig
    from pegboard.config.load import load_draft
    from pegboard.config.models import PLUGINS_KEYS

    draft = load_draft(file=config)
    file = config if config is not None else os.environ.get("PEGBOARD_CONFIG")
    unusable = [p for p in draft.problems() if p.where == file or p.where.startswith("plugins.")]
    if unusable:
        raise ConfigError(unusable)
    return PluginsConfig(**{key: draft.get(f"plugins.{key}") for key in PLUGINS_KEYS})


Answer = tuple[int, Any, Iterable[str]]


def _list(args: argparse.Namespace, host: PluginHost) -> Answer:
    from pegboard.plugins.report import plugin_data

    data = [plugin_data(r) for r in host.records]
    return 0, data, [*_table(data), *(f"warning: {w}" for w in host.problems)]


def _table(plugins: list[dict[str, Any]]) -> list[str]:
    """Columns, then under each plugin what it offers or why it does not."""
    if not plugins:
        return ["no plugin is installed; pip install pegboard[standard]"]
    columns = ("name", "distribution", "version", "status")
    widths = {c: max(len(c), *(len(p[c]) for p in plugins)) for c in columns}
    lines = ["  ".join(c.ljust(widths[c]) for c in columns) + "  entry point"]
    for plugin in plugins:
        status = "  ".join(str(plugin[c]).ljust(widths[c]) for c in columns)
        lines.append(f"{status}  {plugin['entry_point']}" + ("  (active)" if plugin["active"] else ""))
        if plugin["reason"]:
            lines.append(f"    {plugin['reason']}")
        kinds: dict[str, list[str]] = {}
        for offer in plugin["providers"]:
            mark = "" if offer["usable"] else f" (unusable: contract version {offer['api']}, not {offer['host_api']})"
            kinds.setdefault(f"{offer['kind']} v{offer['host_api']}", []).append(offer["name"] + mark)
        lines += [f"    {kind}: {', '.join(names)}" for kind, names in kinds.items()]
        others = [h for h in plugin["hooks"] if h not in _offering()]
        lines += [f"    hooks: {', '.join(others)}"] if others else []
        lines += [f"    note: {note}" for note in plugin["notes"]]
    return lines


def _offering() -> set[str]:
    from pegboard.plugins.provider import KINDS

    return {kind.hook for kind in KINDS.values()}


def _show(args: argparse.Namespace, host: PluginHost) -> Answer:
    from pegboard.plugins.report import find

    found = find(args.name, host)
    if not found:
        return _nothing(args.name, host)
    for item in found:
        if item["what"] == "kind":
            item["chosen"] = _chosen(item["kind"], args.config, host)
        if item["what"] == "kind" and item["kind"] == "attention":
            item["layers"] = _attention(args)
    lines: list[str] = []
    for item in found:
        told = _facts({key: value for key, value in item.items() if key != "layers"}) + _layers(item.get("layers", []))
        lines += ["", *told] if lines else told
    return 0, found, lines


def _chosen(kind: str, config: str | None, host: PluginHost) -> str:
    """What the configuration, without the arguments of another command, means by a kind that may be left at "auto"."""
    from pegboard.config.load import load_draft
    from pegboard.plugins.report import choice_of

    settings, problems = load_draft(file=config, model="any").attempt()
    return f"not known: {'; '.join(map(str, problems))}" if settings is None else choice_of(kind, settings, host)


def _attention(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What ``attention_data`` says of the model that is configured, if one is. The rest of the configuration is that of ``show``:
    the file and the environment."""
    from pegboard.config.load import load_draft
    from pegboard.engine.bootstrap import prepare
    from pegboard.plugins.attention_report import attention_data

    given = {"model": args.model} if args.model else {}
    if not given and not load_draft(file=args.config).is_set("model"):
        return []
    return attention_data(prepare(file=args.config, **given).composition)


def _layers(found: list[dict[str, Any]]) -> list[str]:
    lines = []
    for kind in found:
        lines += [f"layers: {kind['layers']}", f"  chosen: {kind['chosen']}"]
        lines += [f"  {name}: {answer}" for name, answer in kind["backends"].items()]
    return lines


def _facts(item: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for key, value in item.items():
        if value in ("", [], {}):
            continue
        if isinstance(value, list) and isinstance(value[0], dict):
            lines.append(f"{indent}{key}:")
            for entry in value:
                lines.append(f"{indent}  {entry['kind']}:{entry['name']}  {entry['reason'] or entry['summary']}")
        elif isinstance(value, dict):
            lines.append(f"{indent}{key}:")
            lines += [f"{indent}  {name}  ({v['distribution']} {v['version']})  {v['summary']}" for name, v in value.items()]
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else value
            lines.append(f"{indent}{key}: {text}")
    return lines


def _nothing(name: str, host: PluginHost) -> Answer:
    from pegboard.plugins.provider import KINDS
    from pegboard.plugins.suggestions import did_you_mean, package_of

    known = {r.name for r in host.records} | {r.distribution for r in host.records} | set(KINDS)
    known |= {n for kind in KINDS for n in host.providers(kind)}
    package = package_of(name)
    hint = f"; it comes with another package: pip install {package}" if package else did_you_mean(name, known - {""})
    message = f"no plugin, distribution, provider or kind is called {name!r}{hint}"
    print(f"pegboard: error: {message}", file=sys.stderr)
    return 2, {"error": message}, []


def _check(args: argparse.Namespace, host: PluginHost) -> Answer:
    from pegboard.plugins.report import check_plugin, check_providers, named_providers
    from pegboard.plugins.selection import matches

    records = [r for r in host.records if matches(r, args.name)]
    providers = [] if records else named_providers(args.name, host)
    if not records and not providers:
        return _nothing(args.name, host)
    problems, notes = check_providers(providers, host)
    for record in records:
        found, more = check_plugin(record, host)
        problems += found
        notes += more
    count = len(providers) + sum(len(r.offers) for r in records)
    fine = f"{args.name}: {count} provider{'s' if count != 1 else ''} checked, all keep their contracts"
    return _verdict({"name": args.name, "checked": count}, problems, notes, fine)


def _doctor(args: argparse.Namespace, host: PluginHost) -> Answer:
    from pegboard.plugins.report import doctor

    problems, notes = doctor(host, load_targets=args.targets)
    counts = {str(s): sum(r.status == s for r in host.records) for s in sorted({r.status for r in host.records})}
    summary = ", ".join(f"{n} {s}" for s, n in counts.items()) or "none installed"
    return _verdict({"plugins": counts}, problems, notes, f"plugins: {summary}; nothing is wrong")


def _verdict(data: dict[str, Any], problems: list[str], notes: list[str], fine: str) -> Answer:
    lines = [*(f"problem: {p}" for p in problems), *(f"note: {n}" for n in notes)]
    if not problems:
        lines.append(fine)
    return int(bool(problems)), {**data, "problems": problems, "notes": notes}, lines
