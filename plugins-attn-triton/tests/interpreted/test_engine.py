"""A whole engine on interpreted kernels: the same tokens as on the standard backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM, SamplingParams
from pegboard.testing.checkpoints import make_checkpoint

PROMPTS = [[5, 9, 200, 31, 7, 7, 13], [400], [8] * 21]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), num_layers=1, num_heads=3, num_kv_heads=1, hidden_size=48)


def tokens(folder: Path, backend: str, **settings: Any) -> list[list[int]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    options = {"dtype": "float32", "kv_cache": {"num_blocks": 40, "block_size": 8}, "executor": {"num_threads": 1}}
    with LLM(str(folder), attention={"backend": backend}, **{**options, **settings}) as llm:
        return [list(answer.outputs[0].token_ids) for answer in llm.generate(PROMPTS, sampling)]


def test_named_kernels_give_the_tokens_of_the_standard_backend(folder: Path) -> None:
    assert tokens(folder, "triton") == tokens(folder, "torch")


def test_auto_is_the_standard_backend(folder: Path) -> None:
    """Interpreted kernels are never chosen, only named: this is done in no time."""
    assert tokens(folder, "auto") == tokens(folder, "torch")


@pytest.mark.parametrize("backend", ["torch,triton", "triton,torch"])
def test_pairs_of_two_packages(folder: Path, backend: str) -> None:
    chunks = {"scheduler": {"max_num_batched_tokens": 16, "max_num_seqs": 4}}
    assert tokens(folder, backend, **chunks) == tokens(folder, "torch", **chunks)
