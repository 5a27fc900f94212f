"""Backends for kinds of layers, and for groups that share a block table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM, SamplingParams
from pegboard.contracts.attention import AttentionQuery, Support
from pegboard.plugins import hookimpl
from pegboard.plugins.provider import AttentionBackendProvider
from pegboard.testing.checkpoints import make_checkpoint
from pegboard_plugins.attention.torch_backend import TorchAttentionBackend

WINDOW = 10
KINDS = ["full_attention", "sliding_attention"] * 2


class NoWindows(TorchAttentionBackend):
    name = "no_windows"

    @classmethod
    def supports(cls, query: AttentionQuery) -> Support:
        window = None if query.sliding_window is None else "has no windows"
        return Support.of(window, *super().supports(query).reasons)


class OnlyWindows(TorchAttentionBackend):
    name = "only_windows"

    @classmethod
    def supports(cls, query: AttentionQuery) -> Support:
        none = "has windows only" if query.sliding_window is None else None
        return Support.of(none, *super().supports(query).reasons)


class Backends:
    """Offers ``backends``, before all others."""

    def __init__(self, *backends: type[TorchAttentionBackend]) -> None:
        self.backends = backends

    @hookimpl
    def attention_backends(self) -> Iterator[AttentionBackendProvider]:
        for backend in self.backends:
            yield AttentionBackendProvider(name=backend.name, target=backend, priority=1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    window = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": KINDS}
    return make_checkpoint(tmp_path_factory.mktemp("kinds"), "Qwen3ForCausalLM", num_layers=4, config_overrides=window)


@pytest.fixture
def open_llm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    opened: list[LLM] = []

    def open_(*backends: type[TorchAttentionBackend], **options: Any) -> LLM:
        plugins = {"kinds": Backends(*backends), "enabled": ["kinds"]}
        kv_cache = {"block_size": 4, "num_blocks": 100}
        opened.append(
            LLM(str(folder), dtype="float32", executor={"num_threads": 1}, kv_cache=kv_cache, plugins=plugins, **options)
        )
        return opened[-1]

    yield open_
    for llm in opened:
        llm.shutdown()


def used(llm: LLM) -> list[str]:
    [names] = llm.collective_rpc(lambda worker: [backend.name for backend in worker.runner.backends])
    return names  # type: ignore[no-any-return]


def answer(llm: LLM) -> list[int]:
    [output] = llm.generate([list(range(4, 40))], SamplingParams(temperature=0, max_tokens=24))
    return list(output.outputs[0].token_ids)


def test_each_kind_of_layers_gets_its_backend(open_llm: Any) -> None:
    several, one = open_llm(NoWindows, OnlyWindows), open_llm()
    assert used(several) == ["no_windows", "only_windows"]
    assert used(one) == ["torch", "torch"]
    assert answer(several) == answer(one)


def test_layers_that_share_a_table_get_a_backend_that_serves_all(open_llm: Any) -> None:
    """A window as long as the context makes no group of its own, but is one to the backend."""
    llm = open_llm(NoWindows, max_model_len=WINDOW)
    assert len(used(llm)) == 1
    assert used(llm) == ["torch"]
    with pytest.raises(Exception, match=r"serves all of them, which share a block table: 'no_windows' not .*has no windows"):
        open_llm(NoWindows, OnlyWindows, max_model_len=WINDOW)
