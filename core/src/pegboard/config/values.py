"""Types of single values: counts, sizes in bytes, seconds, and names of parts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, WithJsonSchema

_UNITS: Final = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_SIZE: Final = r"\s*(\d+(?:\.\d+)?)\s*([KMGTkmgt]?)(?:[iI]?[bB])?\s*"
MAX_COUNT: Final = 2**31 - 1
"""Largest count: token and block numbers travel as 32-bit integers."""
MAX_INT: Final = 2**63 - 1


def parse_bytes(value: Any) -> Any:
    """``"4GiB"``, ``"512 MB"``, ``"1.5G"`` or a number, in bytes; K, M, G and T are powers of 1024 with or without "iB".

    Anything but text is returned as it is. Raises ``ValueError`` for text that is no size.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(_SIZE, value)
    if match is None:
        raise ValueError(f"{value!r} is not a size; write a number of bytes, or for example '512MiB' or '4GiB'")
    return int(Decimal(match[1]) * _UNITS[match[2].upper()])


def refuse_bool(value: Any) -> Any:
    """``true`` is no number, although Python counts it as 1."""
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


ByteSize = Annotated[
    int,
    Field(ge=0, le=MAX_INT),
    BeforeValidator(parse_bytes),
    BeforeValidator(refuse_bool),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": f"^{_SIZE}$"}], "format": "byte-size"},
        mode="validation",
    ),
]
# Constraints come before the validators, so that they reach the JSON schema.
PositiveInt = Annotated[int, Field(ge=1, le=MAX_COUNT), BeforeValidator(refuse_bool)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT), BeforeValidator(refuse_bool)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(refuse_bool)]
Share = Annotated[float, Field(gt=0, le=1), BeforeValidator(refuse_bool)]
Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class PartName:
    """Marks a field that names a part: a provider of ``kind``, or ``package.module:Class``.

    ``auto``: the word "auto" is no name there, it leaves the choice open. ``words``: others that are no names. ``paired``: two
    names with a comma between them are a pair.
    """

    kind: str
    auto: bool = False
    words: tuple[str, ...] = ()
    paired: bool = False

    def names(self, value: str) -> list[str]:
        """The names in one value: one, or, where it may be ``paired``, those between commas."""
        return [name.strip() for name in value.split(",")] if self.paired else [value]

    @property
    def choices(self) -> tuple[str, ...]:
        """Words that are no names."""
        return (*(("auto",) if self.auto else ()), *self.words)
