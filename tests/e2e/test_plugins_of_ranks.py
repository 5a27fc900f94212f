"""A plugin of a third party that supplies a model, an attention backend and a logits processor: used wherever they compute, and
loaded once in each process that needs them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.distributions import forget_modules, write_distribution

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("pegboard_executor_mp") is None, reason="pegboard-executor-mp is not installed"),
]

PLUGIN = """
    import os

    from pegboard.plugins import AttentionBackendProvider, LogitsProcessorProvider, ModelProvider, hookimpl

    with open(os.environ["ACME_NOTES"], "a") as notes, open("/proc/self/comm") as kind:
        notes.write(f"{os.getpid()} {kind.read()}")

    @hookimpl
    def models():
        yield ModelProvider(
            name="acme", target="acme_parts.parts:AcmeForCausalLM", spec="pegboard_plugins.models.spec:llama_spec",
            architectures=("AcmeForCausalLM",), capabilities=frozenset({"tp", "pp"}),
        )

    @hookimpl
    def attention_backends():
        yield AttentionBackendProvider(name="acme", target="acme_parts.parts:AcmeAttention", priority=-1)

    @hookimpl
    def logits_processors():
        yield LogitsProcessorProvider(name="acme", target="acme_parts.parts:EvenOnly")
"""
PARTS = """
    from pegboard.contracts.logits_processor import LogitsProcessor
    from pegboard_plugins.attention.torch_backend import TorchAttentionBackend
    from pegboard_plugins.models.llama import LlamaForCausalLM

    class AcmeForCausalLM(LlamaForCausalLM):
        pass

    class AcmeAttention(TorchAttentionBackend):
        pass

    class EvenOnly(LogitsProcessor):
        def update_state(self, delta):
            pass

        def apply(self, logits, rows):
            logits[:, 1::2] = float("-inf")
            return logits
"""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the plugin, now installed, writes a line when it is loaded: pid and kind of the process."""
    modules = {"acme_parts.plugin": PLUGIN, "acme_parts.parts": PARTS}
    write_distribution(tmp_path / "site", "acme-parts", modules, {"acme_parts": "acme_parts.plugin"})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("ACME_NOTES", str(tmp_path / "notes"))
    yield tmp_path / "notes"
    forget_modules(list(modules))


def look(worker: Any) -> tuple[int, str, str]:
    return os.getpid(), type(worker.runner.model).__name__, type(worker.runner.backends[0]).__name__


def test_each_process_that_needs_a_plugin_has_it_once(notes: Path, tmp_path: Path, open_llm: Any, greedy: Any) -> None:
    folder = make_checkpoint(tmp_path / "model", config_overrides={"architectures": ["AcmeForCausalLM", "LlamaForCausalLM"]})
    named = {"attention": {"backend": "acme"}, "sampling": {"logits_processors": ["acme"]}}
    said, ranks = [], []
    for executor, options in (
        ({"name": "uniproc"}, {}),
        ({"name": "mp", "tensor_parallel_size": 2}, {"executor_mp": {"start_method": "fork_server"}}),
        ({"name": "mp", "tensor_parallel_size": 2}, {"executor_mp": {"start_method": "spawn"}}),
    ):
        llm = open_llm(folder, executor=executor, plugins={"enabled": ["acme_parts"], **options}, **named)
        said.append(list(llm.generate("go on", greedy(20))[0].outputs[0].token_ids))
        for pid, *used in llm.collective_rpc(look):
            assert used == ["AcmeForCausalLM", "AcmeAttention"]
            ranks.append(pid)
    assert said[0] == said[1] == said[2]
    assert all(token % 2 == 0 for token in said[0])
    assert len(set(ranks)) == 5
    [own, *others] = [line.split() for line in notes.read_text().splitlines()]
    assert int(own[0]) == os.getpid() == ranks[0]
    assert sorted(int(pid) for pid, _ in others) == sorted(ranks[1:])
    assert sorted(kind for _, kind in others) == ["pegboard-rank0"] * 2 + ["pegboard-rank1"] * 2
