"""Ranks as they really are: a process each, joined by the communicators of this package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.plan_driver import PlanDriver, random_prompts
from pegboard.testing.rank_pool import RankPool
from pegboard.testing.rank_workers import RankWorkers
from pegboard.wire import SamplingParams

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 512},
    "kv_cache": {"block_size": 8, "memory": "16MiB"},
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    made = RankPool(4)
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two key heads: on four ranks, two hold each. Sums of long prompts are larger than what is exchanged at once."""
    return make_checkpoint(
        tmp_path_factory.mktemp("processes"),
        num_layers=3,
        num_heads=8,
        num_kv_heads=2,
        hidden_size=512,
        head_dim=16,
        vocab_size=1003,
    )


def run(pool: RankPool, folder: Path, tp: int = 1, pp: int = 1, **executor: Any) -> dict[str, Any]:
    """Greedy and seeded answers to prompts that come in chunks, some of them forked, some masked."""
    workers = RankWorkers(pool, tp, pp, model=str(folder), executor=executor, **SETTINGS)
    try:
        driver = PlanDriver(
            workers.execute_model,
            num_slots=8,
            block_size=8,
            num_blocks=120,
            sample=workers.sample_tokens,
            vocab_size=1003,
            sends_tokens=pp > 1,
        )
        for name, prompt in random_prompts(3, 17, 200).items():
            driver.add(name, prompt, SamplingParams(temperature=0.0, max_tokens=None, logprobs=4, prompt_logprobs=1))
            driver.fork(f"{name}-fork", name, SamplingParams(temperature=1.2, seed=3, max_tokens=None))
        driver.generate(12, chunk=170)
        for _ in range(3):
            driver.step(dict.fromkeys(driver.requests, 1), {name: range(5, 9) for name in driver.requests})
        return {name: _told(request) for name, request in driver.requests.items()}
    finally:
        workers.close()


def _told(request: Any) -> Any:
    """Tokens, and log probabilities as numbers."""
    entries = [*request.logprobs, *request.prompt_logprobs.values()]
    return request.output, [value for entry in entries for value in entry.logprobs]


@pytest.fixture(scope="module")
def wanted(pool: RankPool, folder: Path) -> dict[str, Any]:
    found = run(pool, folder)
    for output, values in found.values():
        assert set(output[-3:]) <= set(range(5, 9)), "masked"
        assert len(values) == 0 or len(values) > 30
    return found


@pytest.mark.parametrize("communicator", ["shared_memory", "torch_distributed"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_answers_are_those_of_one_process(
    pool: RankPool, folder: Path, wanted: dict[str, Any], communicator: str, tp: int, pp: int
) -> None:
    found = run(pool, folder, tp, pp, communicator=communicator)
    for name, (output, values) in wanted.items():
        assert found[name][0] == output
        assert found[name][1] == pytest.approx(values, abs=1e-3)


def test_free_memory_is_counted_once(pool: RankPool, folder: Path) -> None:
    """Each of the workers of a host has a part of what is free, less what its own steps take."""
    settings = {**SETTINGS, "kv_cache": {"memory_fraction": 1e-6}}
    reports = []
    for tp in (1, 2):
        workers = RankWorkers(pool, tp, model=str(folder), **settings)
        reports.append(workers.reports)
        workers.close()
    [[alone], both] = reports
    free = [int(report.reason.split(" of ")[1].split()[0]) for report in (alone, *both)]
    assert all(abs(each / free[0] - 0.5) < 0.2 for each in free[1:]), free
