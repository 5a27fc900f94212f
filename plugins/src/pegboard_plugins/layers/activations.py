"""Activation functions of gated MLPs, by name. Needs no torch."""

from __future__ import annotations

from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
"""``x * sigmoid(x)``; the Gaussian error unit by its approximation with tanh."""
