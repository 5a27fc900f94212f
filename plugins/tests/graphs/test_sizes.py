"""Which sizes are captured."""

from __future__ import annotations

import itertools

import pytest

from pegboard.config import ConfigError, load_config
from pegboard_plugins.graphs.sizes import capture_sizes, default_sizes


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 8, 9, 64, 100, 128, 129, 256, 500, 1024])
def test_sizes_lead_up_to_the_most(most: int) -> None:
    sizes = default_sizes(most)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, most)
    for before, size in itertools.pairwise(sizes):
        assert size - before <= max(8, before // 8), "padding stays small"


def test_there_are_not_too_many() -> None:
    assert default_sizes(16) == [1, 2, 4, 8, 16]
    assert len(default_sizes(64)) == 11
    assert len(default_sizes(1024)) < 60


def test_configured_sizes_are_sorted_and_cut_off_where_no_step_is_so_large() -> None:
    assert capture_sizes((8, 1, 8, 3, 20), 8) == [1, 3, 8]
    assert capture_sizes((), 8) == []
    assert capture_sizes(None, 8) == [1, 2, 4, 8]


def test_sizes_that_no_step_can_have_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"compilation.capture_sizes: no step has 9 rows: scheduler.max_num_seqs is 8"
    ) as caught:
        load_config(env={}, model="m", scheduler={"max_num_seqs": 8}, compilation={"capture_sizes": [4, 9]})
    assert "raise scheduler.max_num_seqs" in str(caught.value)
