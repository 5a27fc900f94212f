"""Engines on a device that records: the processor, which compares what it replays with what was captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from pegboard import LLM
from pegboard.plugins import AttentionBackendProvider, CommunicatorProvider, PlatformProvider, hookimpl
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.graph_attention import GraphableAttention
from pegboard.testing.recorded_graphs import RecordingPlatform
from pegboard.testing.thread_communicator import ThreadCommunicator
from pegboard.testing.thread_executor import THREADS, ThreadRanks


class CapturableThreads(ThreadCommunicator):
    """Works in place, and for a recording is one operation, as a device's collectives are."""

    capturable = True

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            return tensor.copy_(super().all_reduce(tensor.clone()))


class Recording:
    @hookimpl
    def platforms(self) -> Any:
        yield PlatformProvider(name="recording", target=RecordingPlatform)

    @hookimpl
    def attention_backends(self) -> Any:
        yield AttentionBackendProvider(name="graphable", target=GraphableAttention)

    @hookimpl
    def communicators(self) -> Any:
        yield CommunicatorProvider(name="capturable", target=CapturableThreads)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("graphs"), num_layers=2)


@pytest.fixture
def open_llm(folder: Path) -> Iterator[Callable[..., LLM]]:
    """``open_llm(tp=1, pp=1, model=folder, config fields)``: float32, 8 requests at once, closed after the test."""
    opened: list[LLM] = []

    def open_(tp: int = 1, pp: int = 1, model: Path = folder, **options: Any) -> LLM:
        executor = {"num_threads": 1, **options.pop("executor", {})}
        plugins = {"recording": Recording(), **options.pop("plugins", {})}
        if tp * pp > 1:
            executor = {**THREADS, "tensor_parallel_size": tp, "pipeline_parallel_size": pp, **executor}
            plugins["threads"] = ThreadRanks()
        settings: dict[str, Any] = {
            "dtype": "float32",
            "device": "recording",
            "attention": "graphable",
            "max_model_len": 128,
            "scheduler": {"max_num_seqs": 8},
            "kv_cache": {"num_blocks": 100, "block_size": 8},
            **options,
        }
        opened.append(LLM(str(model), executor=executor, plugins=plugins, **settings))
        return opened[-1]

    yield open_
    for llm in opened:
        llm.shutdown()
