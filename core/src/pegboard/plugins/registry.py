"""Registry: every provider that the loaded plugins offer, by kind and name, and what a name in the configuration means.

A name means, in this order: a class path ``package.module:Class``; ``owner:name``, where owner is a distribution or plugin;
a standard part of that name; the one plugin that offers it. Several plugins offering one name is an error for whoever
asks for the bare name. Nothing depends on the order in which plugins were found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pegboard.plugins.class_path import provider_of_class
from pegboard.plugins.discovery import STANDARD, host_version, installed_version
from pegboard.plugins.errors import DuplicateProviderError, PluginError, UnknownProviderError
from pegboard.plugins.provider import KINDS, Provider
from pegboard.plugins.record import OfferRecord, PluginRecord, PluginStatus
from pegboard.plugins.selection import matches
from pegboard.plugins.suggestions import KNOWN_PACKAGES, near


@dataclass(frozen=True, slots=True)
class Offer:
    """One provider and the plugin that offers it; ``reason`` says why it cannot be used, if so."""

    provider: Provider
    record: PluginRecord
    reason: str = ""


def api_mismatch(provider: Provider, record: PluginRecord) -> str:
    """Why the contract version of ``provider`` is refused, or nothing."""
    kind = KINDS[provider.kind]
    if provider.api == kind.api and not isinstance(provider.api, bool):
        return ""
    if not isinstance(provider.api, int) or isinstance(provider.api, bool):
        remedy = f"a provider must state its version as an integer: {type(provider).__name__}(api={kind.api}, …)"
    elif provider.api > kind.api:
        remedy = "it was made for a newer host: upgrade pegboard, or install an older release of the plugin"
    else:
        remedy = f"it was made for an older host: upgrade {record.distribution or 'the plugin'}, or install an older pegboard"
    return (
        f"{record.label} implements version {provider.api!r} of the {kind.name} contract ({provider.name!r}), and pegboard "
        f"{host_version()} speaks version {kind.api}; {remedy}"
    )


@dataclass(slots=True)
class Registry:
    """Filled once, while a host loads."""

    records: Sequence[PluginRecord]
    offers: dict[str, dict[str, list[Offer]]] = field(default_factory=dict)

    def add(self, record: PluginRecord, providers: Iterable[Provider]) -> None:
        """Take in what one plugin offers, and note it in its record."""
        noted = []
        for provider in providers:
            owned = dataclasses.replace(provider, plugin=record.name)
            offer = Offer(owned, record, api_mismatch(owned, record))
            named = self.offers.setdefault(owned.kind, {}).setdefault(owned.name, [])
            named.append(offer)
            named.sort(key=lambda o: (o.record.distribution, o.record.name))
            noted.append(OfferRecord(owned.kind, owned.name, owned.api, owned.summary, offer.reason))
        record.offers = tuple(noted)

    # -- reading -----------------------------------------------------------------------------------------------------

    def providers(self, kind: str) -> dict[str, Provider]:
        """Usable providers by the names that ``get`` accepts: the bare name where it is unambiguous, else ``owner:name``."""
        self._check_kind(kind)
        found: dict[str, Provider] = {}
        for name, offers in self.offers.get(kind, {}).items():
            usable = [o for o in offers if not o.reason]
            preferred = _preferred(usable)
            for offer in usable:
                found[name if offer is preferred else _full_name(offer, usable)] = offer.provider
        return dict(sorted(found.items()))

    def duplicates(self) -> list[tuple[str, str, str]]:
        """(kind, name, sentence) for each that several plugins offer."""
        found = []
        for kind, names in sorted(self.offers.items()):
            for name, offers in sorted(names.items()):
                usable = [o for o in offers if not o.reason]
                if len(usable) > 1:
                    found.append((kind, name, _duplicate_text(kind, name, usable, _preferred(usable))))
        return found

    def get(self, kind: str, name: str) -> Provider:
        """The provider that ``name`` means. Raises ``UnknownProviderError``, ``DuplicateProviderError``, or ``PluginError`` for
        one that cannot be used."""
        self._check_kind(kind)
        owner, colon, bare = name.rpartition(":")
        if colon:
            return self._qualified(kind, name, owner, bare)
        offers = self.offers.get(kind, {}).get(name, [])
        usable = [o for o in offers if not o.reason]
        chosen = _preferred(usable)
        if chosen is not None:
            return chosen.provider
        if usable:
            raise DuplicateProviderError(_duplicate_text(kind, name, usable, None))
        if offers:
            raise PluginError(offers[0].reason)
        raise UnknownProviderError(self._unknown(kind, name))

    def _qualified(self, kind: str, name: str, owner: str, bare: str) -> Provider:
        offers = [o for o in self.offers.get(kind, {}).get(bare, []) if matches(o.record, owner)]
        usable = [o for o in offers if not o.reason]
        if len(usable) == 1:
            return usable[0].provider
        if len(usable) > 1:
            raise DuplicateProviderError(_duplicate_text(kind, bare, usable, None))
        if offers:
            raise PluginError(offers[0].reason)
        if any(matches(r, owner) for r in self.records):
            # A distribution and a module may share their name, so a class path is still possible.
            try:
                return provider_of_class(kind, name)
            except PluginError:
                raise UnknownProviderError(self._unknown(kind, name)) from None
        return provider_of_class(kind, name)

    def find(self, kind: str, plugin: str, name: str) -> Provider | None:
        """The usable provider ``name`` that one plugin offers."""
        for offer in self.offers.get(kind, {}).get(name, []):
            if offer.record.name == plugin and not offer.reason:
                return offer.provider
        return None

    # -- messages ----------------------------------------------------------------------------------------------------

    def _check_kind(self, kind: str) -> None:
        if kind not in KINDS:
            raise PluginError(f"there is no kind of part called {kind!r}; kinds are {', '.join(sorted(KINDS))}")

    def _unknown(self, kind: str, name: str) -> str:
        known = list(self.providers(kind))
        close = near(name, known)
        parts = [f"no {kind} is called {name!r}; available: {', '.join(map(repr, known)) or 'none'}"]
        package = KNOWN_PACKAGES.get((kind, name))
        record = next((r for r in self.records if r.distribution == package), None) if package else None
        if record is not None and not record.loaded:
            parts.append(f"{package} {record.version} would provide it, but is {record.status}: {record.reason}")
        elif package and installed_version(package) is None:
            parts.append(f"it comes with another package: pip install {package}")
        absent = [r for r in self.records if not r.loaded and r is not record]
        if absent:
            # With a near match a typing mistake is likelier, and the reasons were told when the plugins were loaded.
            listed = [f"{r.label} is {r.status}" + ("" if close else f" ({r.reason})") for r in absent[:5]]
            parts.append(f"plugins that are installed but not loaded, and may provide it: {'; '.join(listed)}")
        if close:
            parts.append(f"did you mean {' or '.join(map(repr, close))}?")
        return "; ".join(parts)


def _preferred(usable: Sequence[Offer]) -> Offer | None:
    """The offer that a bare name means: the standard part, or the only one."""
    standard = [o for o in usable if o.record.distribution == STANDARD]
    if standard:
        return standard[0]
    return usable[0] if len(usable) == 1 else None


def _owner(offer: Offer, offers: Sequence[Offer]) -> str:
    """What names the plugin of ``offer`` among ``offers``: its distribution, unless that has several of them."""
    distribution = offer.record.distribution
    alone = sum(o.record.distribution == distribution for o in offers) == 1
    return distribution if distribution and alone else offer.record.name


def _full_name(offer: Offer, offers: Sequence[Offer]) -> str:
    return f"{_owner(offer, offers)}:{offer.provider.name}"


def _duplicate_text(kind: str, name: str, offers: Sequence[Offer], preferred: Offer | None) -> str:
    who = " and ".join(o.record.label for o in offers)
    choices = " or ".join(repr(_full_name(o, offers)) for o in offers if o is not preferred)
    if preferred is not None:
        return f"{kind} {name!r} is offered by {who}; the name means the standard part, and {choices} chooses the other"
    blockable = " or ".join(sorted({_owner(o, offers) for o in offers}))
    return (
        f"{kind} {name!r} is offered by {who}; name the one you want as {choices}, or keep one out with "
        f"plugins.block = [...] ({blockable})"
    )


def status_of_offers(record: PluginRecord) -> None:
    """A plugin of which nothing can be used is incompatible as a whole."""
    if record.offers and all(o.reason for o in record.offers):
        record.status, record.reason = PluginStatus.INCOMPATIBLE, record.offers[0].reason
