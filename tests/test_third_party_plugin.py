"""A plugin as a third party would ship it: its own distribution, installed into a folder, chosen in a TOML file.

The plugin in ``third_party/shortest_first`` supplies a request queue. Named, it changes the order of service; installed
but not named, it changes nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pegboard.testing.checkpoints import make_checkpoint

SOURCE = Path(__file__).parent / "third_party" / "shortest_first"

SCRIPT = """
import json, sys
from pegboard import LLMEngine, SamplingParams

engine = LLMEngine(config=sys.argv[1])
for name, length in [("long", 40), ("middle", 20), ("short", 5)]:
    engine.add_request(name, list(range(10, 10 + length)), SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
order = []
while engine.has_unfinished_requests():
    order += [o.request_id for o in engine.step() if o.finished]
print(json.dumps(order))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    build = tmp_path_factory.mktemp("build") / "plugin"
    subprocess.run(["cp", "-r", str(SOURCE), str(build)], check=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(build)], check=True, timeout=120)
    return target


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def served(config: Path, site: Path | None) -> list[str]:
    environment = os.environ | ({"PYTHONPATH": str(site)} if site else {})
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(config)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    order: list[str] = json.loads(run.stdout.splitlines()[-1])
    return order


def config_file(folder: Path, checkpoint: Path, queue: str | None) -> Path:
    path = folder / "engine.toml"
    chosen = f'queue = "{queue}"' if queue else ""
    path.write_text(f'model = "{checkpoint}"\ndtype = "float32"\n\n[scheduler]\nmax_num_seqs = 1\n{chosen}\n')
    return path


@pytest.mark.slow
def test_named_queue_changes_the_order_of_service(site: Path, checkpoint: Path, tmp_path: Path) -> None:
    assert served(config_file(tmp_path, checkpoint, "shortest_prompt_first"), site) == ["short", "middle", "long"]


@pytest.mark.slow
def test_installed_but_not_named_changes_nothing(site: Path, checkpoint: Path, tmp_path: Path) -> None:
    config = config_file(tmp_path, checkpoint, None)
    assert served(config, site) == served(config, None) == ["long", "middle", "short"]


@pytest.mark.slow
def test_named_but_not_installed_is_an_error_that_lists_what_is(checkpoint: Path, tmp_path: Path) -> None:
    config = config_file(tmp_path, checkpoint, "shortest_prompt_first")
    run = subprocess.run([sys.executable, "-c", SCRIPT, str(config)], capture_output=True, text=True, timeout=120)
    assert run.returncode != 0
    assert "shortest_prompt_first" in run.stderr
    assert "fcfs" in run.stderr


def test_the_plugin_is_at_most_forty_lines() -> None:
    lines = (SOURCE / "acme_shortest_first" / "__init__.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 40
