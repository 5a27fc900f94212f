"""Settings of the whole test run."""

from __future__ import annotations

from hypothesis import settings

# No test may depend on how fast the machine is. Where CI is set, hypothesis makes its examples deterministic by itself.
settings.register_profile("no-deadline", settings.get_profile(settings.get_current_profile_name()), deadline=None)
settings.load_profile("no-deadline")
