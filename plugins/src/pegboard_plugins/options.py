"""Options of the standard parts: the section ``plugins.standard``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pegboard.config import Section


class StandardOptions(Section):
    json_whitespace: Literal["fixed", "any"] = Field(
        default="fixed",
        description="white space in JSON answers: fixed is ', ' and ': ' as Python's json writes it; any lets the model choose",
    )
