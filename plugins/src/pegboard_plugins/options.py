"""Options of the standard parts: the section ``plugins.standard``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pegboard.config import Section
from pegboard.config.values import Seconds, Text


class StandardOptions(Section):
    json_whitespace: Literal["fixed", "any"] = Field(
        default="fixed",
        description="white space in JSON answers: fixed is ', ' and ': ' as Python's json writes it; any lets the model choose",
    )
    launch_address: Text | None = Field(
        default=None,
        description="host:port of rank 0 at which ranks started by a launcher meet; default: MASTER_ADDR and MASTER_PORT",
    )
    launch_timeout: Seconds = Field(default=300.0, description="seconds that ranks started by a launcher wait for one another")
