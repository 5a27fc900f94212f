"""The queue without Pegboard's core, torch or, for local readers, ZeroMQ."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
sys.modules["pegboard"] = None  # importing it fails
from pegboard_executor_mp.queue import Closed, MessageQueue, attach
queue = MessageQueue.create(1)
reader = attach(queue.handle())
queue.put({"a": b"x" * 100_000})
assert reader.get() == {"a": b"x" * 100_000}
queue.close()
try:
    reader.get()
except Closed as error:
    assert isinstance(error, RuntimeError)
print(sorted(name for name in ("torch", "zmq", "numpy", "pegboard_plugins") if name in sys.modules))
"""


def test_works_alone() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_imports_neither_torch_nor_much_of_core() -> None:
    script = "import sys, pegboard_executor_mp.queue; print(*(name for name in sys.modules if name.partition('.')[0] in "
    script += "('pegboard', 'torch', 'zmq', 'numpy', 'pydantic', 'msgspec')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["pegboard", "pegboard.contracts", "pegboard.contracts.transport"]
