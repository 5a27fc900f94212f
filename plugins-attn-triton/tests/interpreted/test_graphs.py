"""Whole engines that replay decode steps on interpreted kernels: what is refilled for each replay is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pegboard import LLM, SamplingParams
from pegboard.plugins import AttentionBackendProvider, PlatformProvider, hookimpl
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.recorded_graphs import RecordingPlatform
from pegboard_attn_triton.backend import TritonAttentionBackend


class Launched(TritonAttentionBackend):
    """Kernels are no operations of torch. The interpreter's own are not looked at."""

    name = "launched"

    def store(self, *args: Any) -> None:
        with _disable_current_modes():
            super().store(*args)

    def attend(self, *args: Any) -> torch.Tensor:
        with _disable_current_modes():
            return super().attend(*args)


class Recording:
    @hookimpl
    def platforms(self) -> Any:
        yield PlatformProvider(name="recording", target=RecordingPlatform)

    @hookimpl
    def attention_backends(self) -> Any:
        yield AttentionBackendProvider(name="launched", target=Launched)


def test_replayed_steps_give_the_eager_tokens(tmp_path: Path) -> None:
    """The torch backend computes the prompts, which it does sooner."""
    folder = make_checkpoint(tmp_path, num_layers=1)
    prompts = [[5, 6, 7], [9] * 20, [4] * 33, [8]]
    found = []
    for eager in (True, False):
        with LLM(
            str(folder),
            dtype="float32",
            device="recording",
            attention="torch,launched",
            max_model_len=64,
            executor={"num_threads": 1},
            kv_cache={"num_blocks": 60},
            scheduler={"max_num_seqs": 3, "max_num_batched_tokens": 32},
            compilation={"enforce_eager": eager},
            plugins={"recording": Recording()},
        ) as llm:
            assert llm.collective_rpc("graph_report")[0]["sizes"] == (() if eager else (1, 2, 3))
            outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
            found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1]
