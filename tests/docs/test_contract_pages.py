"""The contract pages say what the contracts say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_contract_pages_match_the_source() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "contract_pages.py"), "--check"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
