"""Several workers together keep the contract of one: forks, masks, prompt log probabilities, copies and swaps on every rank."""

from __future__ import annotations

from pegboard.testing.conformance.worker import WorkerConformance


class TestTensorParallel(WorkerConformance):
    ranks = (2, 1)


class TestPipeline(WorkerConformance):
    ranks = (1, 3)


class TestBoth(WorkerConformance):
    ranks = (2, 2)
