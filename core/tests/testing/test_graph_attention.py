"""The attention that tests of graphs use, against plain attention."""

from __future__ import annotations

import pytest

from pegboard.testing.conformance._attention_features import Graphs
from pegboard.testing.graph_attention import GraphableAttention


class TestGraphableAttention(Graphs):
    backend = GraphableAttention

    @pytest.mark.parametrize("limits", ["plain", "window", "soft_cap"])
    def test_mixed_steps(self, limits: str) -> None:
        session = self.session(self.query("smollm2", limits=limits), num_blocks=96)
        session.check([("a", 5), ("b", 1), ("c", 33)])
        session.check([("a", 1), ("pad", 0), ("c", 9), ("d", 18), ("b", 1)])
        session.check([("a", 0)])
