"""ConfigDraft: a configuration in the making. Keeps every value of every source; the highest layer is in force."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from pydantic import BaseModel

from pegboard.config.assembly import assemble
from pegboard.config.errors import ConfigError, Problem, shown, unique
from pegboard.config.fields import FieldTree, Group, Leaf
from pegboard.config.models import PLUGINS_KEYS, EngineConfig
from pegboard.config.placing import Pending, Touched, place, unknown_key
from pegboard.config.provenance import DEFAULT, Assignment, Layer, Origin, Provenance
from pegboard.config.sources import Given

_ONE_VALUE: Final = frozenset({Layer.ENVIRONMENT, Layer.KEYWORD})
"""Layers in which two different values for one field are a contradiction: nothing says which was meant."""
_BY_PLUGIN: Final = frozenset({Layer.PLUGIN, Layer.FORCED})


class ConfigDraft:
    """Fields are named by dotted paths. Reading and writing an unknown path raises ``ConfigError`` with a suggestion."""

    def __init__(self) -> None:
        self.tree = FieldTree()
        self.pending: list[Pending] = []
        """Values for plugin sections that nobody has declared."""
        self.sections_set: dict[str, Origin] = {}
        """Declared plugin sections that occur in a source, with the first one's origin."""
        self._history: dict[str, list[Assignment]] = {}
        self._problems: list[Problem] = []

    # -- reading -------------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        """The value in force as the field's type; for a section a dict. Raises ``ConfigError`` if that value is not allowed."""
        node = self._find(path)
        if isinstance(node, Group):
            return {key: self.get(child.path) for key, child in node.children.items()}
        winner = self.winner(path)
        if winner is None:
            return None if node.required else node.default_value()
        if winner.problem:
            raise ConfigError([winner.problem])
        return winner.value

    def is_set(self, path: str) -> bool:
        """Whether anything but the default gave the field its value; for a section, any of its fields."""
        node = self._find(path)
        return any(leaf.path in self._history for leaf in node.leaves()) if isinstance(node, Group) else path in self._history

    def provenance(self, path: str) -> Provenance:
        """Who set the field, and what that overrode."""
        node = self._find(path)
        if isinstance(node, Group):
            remedy = f"ask for one of its fields, such as {next(node.leaves()).path}"
            raise ConfigError([Problem(path, "is a section, whose fields may come from different sources", remedy)])
        ranked = self._ranked(path)
        if not node.required:
            ranked.append(Assignment(path, node.default_value(), DEFAULT))
        if not ranked:
            return Provenance(path, None, DEFAULT)
        return Provenance(path, ranked[0].value, ranked[0].origin, tuple(ranked[1:]))

    def winner(self, path: str) -> Assignment | None:
        """The assignment in force, or None where the default is."""
        ranked = self._ranked(path)
        return ranked[0] if ranked else None

    # -- writing -------------------------------------------------------------------------------------------------------

    def set(self, path: str, value: Any, *, by: str) -> None:
        """Set a field or section, above all other layers. ``by`` says who does, for messages and ``explain``."""
        self._find(path)
        self.add(Given(tuple(path.split(".")), value, Origin(Layer.SCRIPT, by)))

    def writer(self, plugin: str) -> PluginDraft:
        """The view of this draft that the hook ``configure`` of ``plugin`` gets."""
        return PluginDraft(self, plugin)

    def add(self, given: Given) -> None:
        """Take in what a source gives. Problems are kept for ``problems``."""
        for placed in place(self.tree, given):
            match placed:
                case Assignment():
                    self._record(placed)
                case Pending():
                    self.pending.append(placed)
                case Touched(path, origin):
                    name = path.removeprefix("plugins.")
                    if path.startswith("plugins.") and name in self.tree.sections:
                        self.sections_set.setdefault(name, origin)
                case Problem():
                    self._problems.append(placed)

    def add_problems(self, problems: Iterable[Problem]) -> None:
        self._problems += problems

    def declare_section(self, name: str, model: type[BaseModel]) -> None:
        """Declare ``plugins.<name>``; what sources gave for it is placed and checked now."""
        self.tree.add_section(name, model)
        waiting, self.pending = self.pending, []
        for item in waiting:
            if self.tree.plugins.child(item.name, fold=item.given.text) is None:
                self.pending.append(item)
            else:
                self.add(item.given)

    # -- building ------------------------------------------------------------------------------------------------------

    def problems(self) -> list[Problem]:
        """Everything wrong so far, apart from required fields without a value."""
        bad = [w.problem for path in self._history if (w := self.winner(path)) and w.problem]
        return unique([*self._problems, *bad, *self._conflicts()])

    def attempt(self) -> tuple[EngineConfig | None, list[Problem]]:
        """The configuration, or None and everything that is wrong with it."""
        problems = self.problems()
        config, found = assemble(self, complete=not problems)
        return config, unique([*problems, *found])

    def build(self) -> EngineConfig:
        """The configuration. Raises ``ConfigError`` with all problems.

        Sections of plugins that nobody declared are taken as they are (``prepare`` declares them from the plugins' hooks).
        """
        config, problems = self.attempt()
        if config is None or problems:
            raise ConfigError(problems)
        return config

    # -- own -----------------------------------------------------------------------------------------------------------

    def _find(self, path: str) -> Leaf | Group:
        node = self.tree.find(path)
        if node is None:
            raise ConfigError([unknown_key(self.tree, path, DEFAULT)])
        return node

    def _ranked(self, path: str) -> list[Assignment]:
        """All assignments of a field, the one in force first: by layer, and in one layer the later one."""
        history = self._history.get(path, [])
        order = sorted(range(len(history)), key=lambda i: (history[i].origin.layer, i), reverse=True)
        return [history[i] for i in order]

    def _record(self, new: Assignment) -> None:
        earlier = [a for a in self._history.get(new.path, []) if a.origin.layer == new.origin.layer]
        if new.origin.layer in _ONE_VALUE and any(a.value != new.value for a in earlier):
            message = f"is given twice: {shown(earlier[-1].value)} and {shown(new.value)}"
            self._problems.append(Problem(new.path, message, "give it once", (str(earlier[-1].origin), str(new.origin))))
        self._history.setdefault(new.path, []).append(new)

    def _conflicts(self) -> list[Problem]:
        """Fields that different plugins want to have different, where that decides."""
        found = []
        for path in self._history:
            winner = self.winner(path)
            if winner is None or winner.origin.layer not in _BY_PLUGIN:
                continue
            rivals = {a.origin.source: a for a in self._history[path] if a.origin.layer == winner.origin.layer}
            if any(a.value != winner.value for a in rivals.values()):
                wishes = " and ".join(f"{name!r} wants {shown(a.value)}" for name, a in sorted(rivals.items()))
                sources = tuple(str(a.origin) for _, a in sorted(rivals.items()))
                found.append(Problem(path, f"plugins disagree: {wishes}", f"set {path} yourself, or block one of them", sources))
        return found


class PluginDraft:
    """A draft as a plugin sees it in the hook ``configure``: every write is recorded under the plugin's name."""

    def __init__(self, draft: ConfigDraft, plugin: str) -> None:
        self._draft = draft
        self.plugin = plugin

    def get(self, path: str) -> Any:
        """See ``ConfigDraft.get``."""
        return self._draft.get(path)

    def is_set(self, path: str) -> bool:
        """See ``ConfigDraft.is_set``."""
        return self._draft.is_set(path)

    def provenance(self, path: str) -> Provenance:
        """See ``ConfigDraft.provenance``."""
        return self._draft.provenance(path)

    def set(self, path: str, value: Any, *, force: bool = False) -> bool:
        """Set a field; returns whether the value is in force.

        What a user set stays, unless ``force``, which ``pegboard config explain`` shows. ``plugins.allow`` and its like decided
        what is loaded before this hook ran: they cannot be set any more.
        """
        node = self._draft._find(path)
        if path == "plugins" or path in _SETTLED:
            raise ConfigError([Problem(path, f"plugin {self.plugin!r} cannot set it: plugins are loaded already")])
        layer = Layer.FORCED if force else Layer.PLUGIN
        self._draft.add(Given(tuple(path.split(".")), value, Origin(layer, self.plugin)))
        if isinstance(node, Group):
            return all((w := self._draft.winner(leaf.path)) is None or w.origin.layer is layer for leaf in node.leaves())
        winner = self._draft.winner(path)
        return winner is not None and winner.origin == Origin(layer, self.plugin)


_SETTLED: Final = frozenset(f"plugins.{key}" for key in PLUGINS_KEYS)
