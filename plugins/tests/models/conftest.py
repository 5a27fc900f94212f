"""Load one checkpoint folder with this package and with transformers, the reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.contracts.model_source import ModelSource
from pegboard_plugins.loaders.safetensors_loader import SafetensorsLoader
from pegboard_plugins.models.decoder import Decoder
from pegboard_plugins.models.gemma import GemmaForCausalLM
from pegboard_plugins.models.llama import LlamaForCausalLM
from pegboard_plugins.models.spec import gemma_spec, llama_spec


@pytest.fixture(autouse=True)
def _one_thread_and_no_gradients():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def source_of() -> Callable[[Path], ModelSource]:
    def make(folder: Path) -> ModelSource:
        read = {n: json.loads(p.read_text()) for n in ("config", "generation_config") if (p := folder / f"{n}.json").exists()}
        return ModelSource(
            str(folder), str(folder), "safetensors", "hf", read["config"], read.get("generation_config", {}), resolved_by="test"
        )

    return make


@pytest.fixture
def load(source_of) -> Callable[..., Decoder]:
    def make(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
        source = source_of(folder)
        gemma = source.config["architectures"][0].startswith("Gemma")
        spec = gemma_spec(source) if gemma else llama_spec(source)
        model = (GemmaForCausalLM if gemma else LlamaForCausalLM)(spec, dtype, torch.device("cpu"))
        with SafetensorsLoader().open(source, spec) as weights:
            model.load_weights(weights)
        return model

    return make


@pytest.fixture
def reference() -> Callable[..., Any]:
    def make(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()

    return make


@pytest.fixture
def tokens() -> Callable[..., list[int]]:
    def make(count: int, seed: int = 0, vocab_size: int = 1000) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return [int(t) for t in torch.randint(0, vocab_size, (count,), generator=generator)]

    return make
