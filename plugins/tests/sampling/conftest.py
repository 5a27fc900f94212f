from __future__ import annotations

import pytest

from pegboard_plugins.sampling import candidates, logprobs
from pegboard_plugins.sampling.working_rows import WorkingRows


@pytest.fixture
def device_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs for logits on an accelerator runs on the CPU instead of the host's own code."""
    monkeypatch.setattr(WorkingRows, "on_host", property(lambda self: False))
    monkeypatch.setattr(logprobs, "_measure_on_host", logprobs._measure_on_device)
    monkeypatch.setattr(candidates, "_on_host", lambda rows, count: candidates._on_device(_tensor(rows), count))


def _tensor(rows: object) -> object:
    import torch

    return torch.as_tensor(rows)
