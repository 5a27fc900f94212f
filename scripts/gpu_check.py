"""Check on a machine with an NVIDIA GPU what cannot be checked without one: kernels compiled, at speed, next to plain attention.

    python scripts/gpu_check.py [--only NAME] [--json FILE]

Needs torch and triton, and this checkout; nothing has to be installed, but whole engines (``engine_speed``) need what is in
requirements-dev.txt. Prints a table and ends with status 0 if every check has passed, 1 if one has failed, 2 where there is no
CUDA device. Takes a few minutes.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), *(str(ROOT / folder / "src") for folder in ("core", "plugins", "plugins-attn-triton"))]

SECTIONS = ("attention_kernels", "attention_bandwidth", "engine_speed")
"""Modules of ``gpu_checks``, in order. Each has ``run(device)``, which yields a ``Check`` at a time."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"sections whose name contains this: {', '.join(SECTIONS)}")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    sections = [name for name in SECTIONS if options.only in name]
    if not sections:
        parser.error(f"no section's name contains {options.only!r}: they are {', '.join(SECTIONS)}")
    import torch

    if not torch.cuda.is_available():
        print("there is no CUDA device", file=sys.stderr)
        return 2
    import triton
    from gpu_checks.report import Check

    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    print(f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}, torch {torch.__version__}, triton {triton.__version__}")
    begin, results = time.monotonic(), []
    for name in sections:
        print(f"\n{name}, after {time.monotonic() - begin:.0f} s", flush=True)
        try:
            gc.collect()
            torch.cuda.empty_cache()  # engines count what is free on the device
            for check in importlib.import_module(f"gpu_checks.{name}").run(device):
                results.append(check)
                print(f"  {check}", flush=True)
                write(options.json, results)
        except Exception:
            results.append(Check(name, False, traceback.format_exc(limit=-3)))
            print(f"  {results[-1]}", flush=True)
            write(options.json, results)
    failed = [check for check in results if not check.passed]
    print(f"\n{len(results)} checks, {len(failed)} failed, {time.monotonic() - begin:.0f} s")
    return 1 if failed or not results else 0


def write(file: Path | None, results: list[Any]) -> None:
    """After each check: the rest may take longer than there is."""
    if file is not None:
        file.write_text(json.dumps([check.data() for check in results], indent=1))


if __name__ == "__main__":
    raise SystemExit(main())
