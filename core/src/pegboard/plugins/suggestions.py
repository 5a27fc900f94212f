"""Helpful endings for error messages: near names, and packages that are known to offer a name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

KNOWN_PACKAGES: Final[dict[tuple[str, str], str]] = {
    ("executor", "mp"): "pegboard-executor-mp",
    ("executor", "ray"): "pegboard-executor-ray",
    ("executor", "ray-mq"): "pegboard-executor-ray",
    ("executor", "uniproc"): "pegboard-plugins",
    ("attention", "triton"): "pegboard-attn-triton",
    ("attention", "flash_attn"): "pegboard-attn-triton",
    ("attention", "flash_attn_3"): "pegboard-attn-triton",
    ("attention", "flashinfer"): "pegboard-attn-triton",
    ("attention", "torch"): "pegboard-plugins",
}
"""Where to find a part that is not installed, by kind and name."""

CAPABILITY_PACKAGES: Final[dict[tuple[str, str], str]] = {
    ("executor", "tp"): "pegboard-executor-mp",
    ("executor", "pp"): "pegboard-executor-mp",
    ("executor", "ray"): "pegboard-executor-ray",
    ("executor", "multi_node"): "pegboard-executor-ray",
}


def package_of(name: str) -> str:
    """The package of Pegboard's own that is called ``name`` or offers a part of that name, or nothing."""
    packages = set(KNOWN_PACKAGES.values())
    return name if name in packages else next((p for (_, part), p in KNOWN_PACKAGES.items() if part == name), "")


def near(name: str, known: Iterable[str]) -> list[str]:
    """Up to three names like ``name``, those that differ in case alone first."""
    choices = sorted(set(known))
    same = [k for k in choices if k.lower() == name.lower()]
    folded = {k.lower(): k for k in reversed(choices)}
    close = [folded[m] for m in difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.6)]
    return list(dict.fromkeys(same + close))[:3]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` or nothing."""
    found = near(name, known)
    return f"; did you mean {' or '.join(repr(f) for f in found)}?" if found else ""
