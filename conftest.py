"""Settings of the whole test run."""

from __future__ import annotations

import pytest
from hypothesis import settings

# No test may depend on how fast the machine is. Where CI is set, hypothesis makes its examples deterministic by itself.
settings.register_profile("no-deadline", settings.get_profile(settings.get_current_profile_name()), deadline=None)
settings.load_profile("no-deadline")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``long``, unless the command line speaks of it."""
    if "long" in (config.option.markexpr or ""):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
