"""SamplingParams: what is refused when they are made."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.wire import SamplingParams


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"stop": 5}, "stop=5 must be a list"),
        ({"stop_token_ids": 5}, "stop_token_ids=5 must be a list"),
        ({"stop_token_ids": "12"}, "stop_token_ids='12' must be a list"),
        ({"ext": 5}, "ext=5 must be a dict"),
    ],
)
def test_a_value_of_the_wrong_form_is_a_value_error(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SamplingParams(**fields)
