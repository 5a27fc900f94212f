"""Sources of a configuration: file, environment, command line, keyword arguments. Each yields ``Given`` values with their origin.

A source knows nothing of fields; ``ConfigDraft`` places what it gives in the tree of fields and checks it there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pegboard.config.errors import ConfigError, Problem
from pegboard.config.names import ENV_DELIMITER, ENV_PREFIX
from pegboard.config.provenance import Layer, Origin

CONFIG_VARIABLE: Final = "PEGBOARD_CONFIG"
OTHER_VARIABLES: Final[dict[str, str]] = {
    CONFIG_VARIABLE: "path of the config file, if none is given otherwise",
    "PEGBOARD_PLUGINS_ALLOW": "load only these plugins (comma-separated entry points or distributions)",
    "PEGBOARD_PLUGINS_BLOCK": "never load these plugins (comma-separated entry points or distributions)",
    "PEGBOARD_LOG_LEVEL": "log level of the command line",
}
"""Variables with Pegboard's prefix that are no field. Any other one that names no field is refused."""
SUFFIXES: Final = (".toml", ".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Given:
    """A value (or a mapping of values) for ``path``. ``text``: it and its path were typed as text, in a variable or an option;
    keys may then differ in case and dashes, and the field's type decides how the text is read. ``short``: the first segment
    may be a field's short name."""

    path: tuple[str, ...]
    value: Any
    origin: Origin
    text: bool = False
    short: bool = False


def from_file(file: str | os.PathLike[str]) -> Iterator[Given]:
    """The content of a TOML or YAML file, one ``Given`` per top-level key. Raises ``ConfigError`` for what cannot be read."""
    name = os.fspath(file)
    for key, value in _read(Path(name)).items():
        yield Given((key,), value, Origin(Layer.FILE, name, key))


def from_environment(env: Mapping[str, str]) -> Iterator[Given]:
    """Each variable with the prefix, apart from ``OTHER_VARIABLES``; ``__`` goes one level into a section."""
    for name in sorted(env):
        if name.startswith(ENV_PREFIX) and name not in OTHER_VARIABLES:
            path = tuple(name.removeprefix(ENV_PREFIX).lower().split(ENV_DELIMITER))
            yield Given(path, env[name], Origin(Layer.ENVIRONMENT, name), text=True)


def from_command_line(options: Mapping[str, Any]) -> Iterator[Given]:
    """Options as ``cli_layer`` collects them: ``--scheduler.max-num-seqs`` or ``--set scheduler.max_num_seqs``, to their text.

    A bare dotted path is taken too: for a command's positional arguments, and for options of plugins.
    """
    for option, value in options.items():
        path = option.removeprefix("--set ").removeprefix("--")
        yield Given(tuple(path.split(".")), value, Origin(Layer.COMMAND_LINE, option), text=True, short=True)


def from_keywords(arguments: Mapping[str, Any]) -> Iterator[Given]:
    """Keyword arguments: fields, sections as dicts, dotted paths, and short names of fields where they are unambiguous."""
    for name, value in arguments.items():
        yield Given(tuple(name.split(".")), value, Origin(Layer.KEYWORD, name), short=True)


def _read(path: Path) -> dict[str, Any]:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise _unreadable(path, f"a config file ends in {', '.join(SUFFIXES)}", f"rename it, got suffix {path.suffix!r}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise _unreadable(path, "the config file does not exist", f"looked in {Path.cwd()}") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise _unreadable(path, f"the config file cannot be read: {exc}") from exc
    content = _parse_toml(path, text) if suffix == ".toml" else _parse_yaml(path, text)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise _unreadable(path, f"a config file holds keys and values, not a {type(content).__name__}")
    return content


def _parse_toml(path: Path, text: str) -> Any:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise _unreadable(path, f"not valid TOML: {exc}") from exc


def _parse_yaml(path: Path, text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that occurs twice, where YAML's own loader keeps the last one in silence."""

    def mapping(loader: Loader, node: Any) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = loader.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} occurs twice", key_node.start_mark)
            seen.add(key)
        loader.flatten_mapping(node)
        return {loader.construct_object(k, deep=True): loader.construct_object(v, deep=True) for k, v in node.value}

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as exc:
        raise _unreadable(path, f"not valid YAML: {' '.join(str(exc).split())}") from exc


def _unreadable(path: Path, message: str, remedy: str = "") -> ConfigError:
    return ConfigError([Problem(str(path), message, remedy)])
