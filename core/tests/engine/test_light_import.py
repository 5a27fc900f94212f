"""Importing pegboard costs nothing; its names arrive when they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pegboard


def _modules(code: str) -> set[str]:
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"], capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


def test_importing_the_package_imports_little() -> None:
    assert not {"torch", "numpy", "pydantic", "msgspec", "pluggy"} & _modules("import pegboard; pegboard.__version__")


def test_the_engine_s_front_end_needs_no_torch() -> None:
    names = "LLM, LLMEngine, SamplingParams, EngineConfig, RequestOutput, CompletionOutput"
    assert not {"torch", "numpy", "transformers"} & _modules(f"from pegboard import {names}")


def test_every_public_name_exists() -> None:
    assert all(getattr(pegboard, name) is not None for name in pegboard.__all__)
    assert set(pegboard.__all__) <= set(dir(pegboard))
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = pegboard.LMM
