"""Which sizes a kernel runs with: those measured on this device if there are any, else the shipped ones."""

from __future__ import annotations

import torch

from pegboard_attn_triton.tuning.cache import TuningCache
from pegboard_attn_triton.tuning.config import KernelConfig, Problem
from pegboard_attn_triton.tuning.table import INTERPRETED, lookup


def choose_config(problem: Problem, device: torch.device) -> KernelConfig:
    """Opens the device if torch has not yet."""
    if device.type != "cuda":
        found = INTERPRETED[problem.kernel]
        return KernelConfig(found.block_m and max(found.block_m, problem.group), found.block_n, 1, 1)
    measured = TuningCache.of_device(torch.cuda.get_device_name(device)).get(problem)
    return measured or lookup(problem, torch.cuda.get_device_capability(device))
