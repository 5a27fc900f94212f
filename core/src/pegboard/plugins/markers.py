"""The two pluggy markers of the project. ``hookimpl`` is what a plugin imports; ``hookspec`` is for hooks of its own."""

from __future__ import annotations

from typing import Final

import pluggy

PROJECT: Final = "pegboard"

hookspec: Final = pluggy.HookspecMarker(PROJECT)
hookimpl: Final = pluggy.HookimplMarker(PROJECT)
