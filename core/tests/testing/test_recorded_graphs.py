"""Recordings on the processor notice what a real graph would get wrong without a word."""

from __future__ import annotations

import pytest
import torch

from pegboard.testing.recorded_graphs import RecordedGraphs


def test_a_replay_works_on_what_is_in_the_buffers_now() -> None:
    given, result = torch.ones(3), torch.zeros(3)
    graphs = RecordedGraphs()
    graph = graphs.capture(lambda: result.copy_((given * 2).relu()))
    given.fill_(5)
    graph.replay()
    assert result.tolist() == [10, 10, 10]
    assert graphs.num_bytes == 2 * 3 * 4


def test_other_memory_is_noticed() -> None:
    held = {"given": torch.ones(3)}
    graph = RecordedGraphs().capture(lambda: held["given"].add_(1))
    kept = held["given"]
    held["given"] = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"operation 0 of a replay is .*would be stale"):
        graph.replay()
    held["given"] = kept
    graph.replay()
    assert kept.tolist() == [4, 4, 4]


def test_other_numbers_sizes_and_lengths_are_noticed() -> None:
    held = {"factor": 2.0, "size": 2, "times": 1}
    given = torch.ones(4)

    def run() -> None:
        for _ in range(int(held["times"])):
            given[: int(held["size"])].mul_(held["factor"])

    graph = RecordedGraphs().capture(run)
    for name, value in (("factor", 3.0), ("size", 3), ("times", 2)):
        before, held[name] = held[name], value
        with pytest.raises(RuntimeError, match="would be stale"):
            graph.replay()
        held[name] = before
    held["times"] = 0
    with pytest.raises(RuntimeError, match="2 operations ended after 0"):
        graph.replay()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "waiting",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
        lambda x: x.index_put_((x > 0,), x.new_zeros(())),
    ],
    ids=["item", "mask", "nonzero", "from the host", "put by mask"],
)
def test_what_waits_cannot_be_captured(waiting: object, mode: type) -> None:
    given = torch.ones(3)
    with mode(), pytest.raises(RuntimeError, match="cannot be captured"):
        RecordedGraphs().capture(lambda: waiting(given))  # type: ignore[operator]
