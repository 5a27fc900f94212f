"""What is known of a model before it is loaded: in this process, or in one of its own where torch must stay out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pegboard_plugins.models.transformers import description
from pegboard_plugins.models.transformers.description import Description, describe_model


@pytest.mark.slow
def test_another_process_says_the_same(tiny: Any) -> None:
    """Processes that start workers compose without torch."""
    code = (
        "import sys; from pegboard.engine.bootstrap import prepare\n"
        "executor = {'name': 'mp', 'tensor_parallel_size': 2}\n"
        "composed = prepare(model=sys.argv[1], model_impl='transformers', executor=executor).composition\n"
        "assert 'torch' not in sys.modules\n"
        "spec = composed.spec\n"
        "print(composed.parts['model'].name, spec.num_kv_heads, spec.sliding_window, spec.max_model_len)"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tiny("gemma3").folder)], capture_output=True, text=True, check=True)
    found = describe_model(tiny("gemma3").content)
    assert isinstance(found, Description)
    assert run.stdout.split() == ["transformers", str(found.num_kv_heads), str(found.sliding_window), str(found.max_model_len)]
    assert (found.num_kv_heads, found.sliding_window, found.max_model_len) == (2, 8, 128)


def test_a_failure_of_the_other_process_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho out of memory >&2; exit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(RuntimeError, match="describing the model failed: out of memory"):
        description._described('{"model_type": "gpt2"}', here=False)


def test_sizes(tiny: Any) -> None:
    """Those of the model as it is made, whatever its configuration calls them."""
    for name, heads, width, length in (("falcon", 1, 32, 128), ("falcon-new", 2, 32, 128), ("opt-post-norm", 4, 16, 128)):
        found = describe_model(tiny(name).content)
        assert isinstance(found, Description)
        assert (found.num_kv_heads, found.hidden_size, found.max_model_len) == (heads, width, length)
        assert (found.num_heads, found.head_size, found.num_layers, found.vocab_size) == (4, 8, 3, 300)
    found = describe_model(tiny("mixtral").content)
    assert isinstance(found, Description)
    attention, experts, router = 32 * 32 * 2 + 32 * 16 * 2, 2 * 3 * 32 * 48, 4 * 32
    assert found.layer_weights == attention + experts + router, "of four experts, two are multiplied with"
    assert found.eos_token_ids == [2]
