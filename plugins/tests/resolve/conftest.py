"""One small model, as a folder and as a GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.gguf_files import write_gguf


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    return make_checkpoint(folder, num_layers=1, generation_config={"eos_token_id": [0, 3]})


@pytest.fixture(scope="module")
def gguf_file(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(checkpoint, tmp_path_factory.mktemp("gguf") / "tiny.gguf", "Q8_0")
