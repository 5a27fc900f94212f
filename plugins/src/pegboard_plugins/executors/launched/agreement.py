"""What the engines compare before anything is loaded, and the places that they get."""

from __future__ import annotations

import dataclasses
import platform
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from pegboard.engine.errors import EngineStartError
from pegboard.plugins import Composition, PluginError
from pegboard_plugins.communicators.peers import this_host
from pegboard_plugins.communicators.rendezvous import rendezvous_of, serve
from pegboard_plugins.executors.launched.cohort import Cohort
from pegboard_plugins.executors.launched.folder import make_folder
from pegboard_plugins.executors.launched.place import Place

_MAY_DIFFER: Final = ("executor.num_threads", "observability.")
"""Fields that change nothing that the engines have to agree on."""
_DISTRIBUTIONS: Final = ("torch", "numpy")
"""Whose versions may change a result."""


def compare(cohort: Cohort, composition: Composition) -> None:
    """Raises ``EngineStartError``, on all ranks, listing every difference in configuration, plugins, parts and versions."""
    told = cohort.gather("the comparison of the configurations", _facts(composition)).result()
    lines = _differences(told)
    if lines:
        raise EngineStartError(
            "the ranks have been started differently, and would not compute one thing:\n"
            + "\n".join(f"  - {line}" for line in lines)
            + "\ngive all ranks the same arguments, files, environment variables and packages"
        )


def _facts(composition: Composition) -> dict[str, str]:
    """Text by name, so that whatever a rank has can be shown on the others."""
    config, host = composition.config, composition.host
    settings = _leaves("", config.model_dump(mode="json"))
    facts = {f"setting {path}": text for path, text in settings if not path.startswith(_MAY_DIFFER)}
    facts |= {f"model's {path}": text for path, text in _leaves("", dataclasses.asdict(composition.spec))}
    for record in host.records:
        if record.loaded and record.active:
            label = f"{record.label} {record.value or type(record.plugin).__qualname__}"
            facts[f"plugin {record.name}"] = label
    facts |= {f"part {kind}": f"{provider.name} of {provider.plugin}" for kind, provider in composition.parts.items()}
    for kind, providers in composition.extensions.items():
        if kind in ("logits_processor", "worker_extension"):
            facts[f"parts {kind}"] = ", ".join(provider.name for provider in providers)
    facts |= {f"version of {name}": _version(name) for name in ("pegboard", "pegboard-plugins", *_DISTRIBUTIONS)}
    facts["version of Python"] = ".".join(platform.python_version_tuple()[:2])
    return facts


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Dotted path and text of every value inside."""
    if isinstance(value, Mapping) and value:
        for name in sorted(value, key=str):
            yield from _leaves(f"{path}.{name}" if path else str(name), value[name])
    else:
        yield path, repr(sorted(value, key=repr) if isinstance(value, set | frozenset) else value)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _differences(told: Sequence[Mapping[str, str]]) -> list[str]:
    lines = []
    for name in dict.fromkeys(name for facts in told for name in facts):
        values: dict[str, list[int]] = {}
        for rank, facts in enumerate(told):
            values.setdefault(facts.get(name, "none"), []).append(rank)
        if len(values) > 1:
            shown = "; ".join(f"{value:.200} on rank {', '.join(map(str, ranks))}" for value, ranks in values.items())
            lines.append(f"{name}: {shown}")
    return lines


def find_hosts(cohort: Cohort) -> list[tuple[str, str]]:
    """By rank: what tells its host from others, and the host's name."""
    return cohort.gather("the comparison of the hosts", (this_host(), socket.gethostname())).result()


def local_rank(place: Place, hosts: Sequence[tuple[str, str]]) -> int:
    """What the launcher says, or this rank's number among those of its host."""
    if place.local_rank is not None:
        return place.local_rank
    return sum(host == hosts[place.rank] for host in hosts[: place.rank])


def make_rendezvous(cohort: Cohort, hosts: Sequence[tuple[str, str]], address: str, sees: Callable[[str], bool]) -> str:
    """Where the communicators of this engine meet: a folder in shared memory if all ranks see one, else a store of this engine
    alone, which rank 0 serves at ``address``, its own."""
    if cohort.size == 1:
        return ""
    if len({host for host, _ in hosts}) == 1:
        if cohort.rank == 0:
            cohort.folder = make_folder()
        cohort.folder = cohort.gather("the rendezvous folder", cohort.folder).result()[0]
        if all(cohort.gather("the sight of the rendezvous folder", sees(cohort.folder)).result()):
            return cohort.folder
    where = ""
    if cohort.rank == 0:
        store = serve(address)
        cohort.kept.append(store)
        where = rendezvous_of(store)
    return str(cohort.gather("the rendezvous store", where).result()[0])


def check_communicator(composition: Composition, hosts: Sequence[tuple[str, str]]) -> Composition:
    """``composition`` with a communicator for ranks on these hosts. Raises ``EngineStartError`` where the one
    that is named is not."""
    if len({host for host, _ in hosts}) == 1:
        return composition
    try:
        return composition.across_hosts()
    except PluginError as error:
        names = ", ".join(dict.fromkeys(name for _, name in hosts))
        raise EngineStartError(f"the ranks are on the hosts {names}: {error}") from error
