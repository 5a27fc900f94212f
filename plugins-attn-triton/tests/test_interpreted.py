"""Runs the tests in ``interpreted``, file by file, where ``TRITON_INTERPRET=1`` was set from the beginning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pegboard_attn_triton.device import interpreting

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(interpreting(), reason="everything is interpreted: these tests run as they are"),
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FILES)
def test_interpreted(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / name)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=FOLDER.parents[2])
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) > 0


def test_there_are_interpreted_tests() -> None:
    assert {"test_kit.py", "test_store.py", "test_tiles.py", "test_adapters.py"} <= set(FILES)
