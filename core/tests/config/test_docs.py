"""docs/configuration.md says what the code does."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from pegboard.config import EngineConfig
from pegboard.config.allowed import allowed
from pegboard.config.fields import FieldTree
from pegboard.config.sources import OTHER_VARIABLES

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not part of this tree")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def rows() -> list[str]:
    """The table of fields, as it has to be on the page."""
    found = []
    for leaf in FieldTree().leaves():
        default = "required" if leaf.required else f"`{json.dumps(leaf.default)}`"
        found.append(f"| `{leaf.path}` | {allowed(leaf.schema())} | {default} | {leaf.description} |")
    return found


def test_examples_run() -> None:
    examples = blocks("python")
    assert len(examples) >= 4
    for code in examples:
        namespace: dict[str, Any] = {"__name__": "example"}
        exec(compile(code, str(PAGE), "exec"), namespace)


def test_the_files_are_right_and_mean_the_same() -> None:
    (toml,), (text,) = blocks("toml"), blocks("yaml")
    assert EngineConfig.model_validate(tomllib.loads(toml)) == EngineConfig.model_validate(yaml.safe_load(text))


def test_the_table_lists_every_field() -> None:
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert table == rows()


def test_the_page_names_every_variable_that_is_no_field() -> None:
    page = PAGE.read_text()
    assert [name for name in OTHER_VARIABLES if f"`{name}`" not in page] == []
