"""FakeComposition: parts given by hand, for tests of one part that asks a composition for others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pegboard.config import EngineConfig
from pegboard.contracts.model import ModelSpec
from pegboard.contracts.model_source import ModelSource
from pegboard.plugins import PluginHost
from pegboard.plugins.provider import accepted_arguments


def fake_spec(max_model_len: int = 1 << 20, vocab_size: int = 1000) -> ModelSpec:
    return ModelSpec(
        architecture="Fake",
        vocab_size=vocab_size,
        hidden_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=8,
        max_model_len=max_model_len,
    )


class FakeComposition:
    """``parts`` maps kinds to classes or factories; like the real one, each gets by name what it accepts. Its host has no
    plugins."""

    def __init__(
        self, config: EngineConfig, parts: Mapping[str, Callable[..., Any]], spec: ModelSpec | None = None, **several: list[Any]
    ) -> None:
        self.config, self.parts, self.spec = config, dict(parts), spec or fake_spec()
        self.source = ModelSource("fake", "fake", "fake", "fake", {})
        self.several = several
        self.host = PluginHost.load(discovery=False)

    def create(self, kind: str, **available: Any) -> Any:
        offered = {"config": self.config, "composition": self, "source": self.source, "spec": self.spec, "options": None}
        return self.parts[kind](**accepted_arguments(self.parts[kind], {**offered, **available}))

    def create_all(self, kind: str, **available: Any) -> dict[str, Any]:
        """``several[kind]``: parts that are there already."""
        return {f"{kind}{i}": part for i, part in enumerate(self.several.get(kind, []))}

    def options(self, plugin: str) -> None:
        return None
