"""The examples of the pages that show the Python API run, one after the other, as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["python-api.md", "sampling.md"])
def test_the_examples_run(page: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 5
    names: dict[str, Any] = {}
    try:
        for block in blocks:
            exec(compile(block, page, "exec"), names)
    finally:
        names["llm"].shutdown()


def test_the_page_on_sampling_lists_every_field() -> None:
    from pegboard import SamplingParams

    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "sampling.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(SamplingParams.__struct_fields__)
